"""A whole run: what it needs, one after the other, and then the loop of its steps.

What a run does besides training is done by callbacks (:mod:`megapipe.train.callbacks`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from megapipe.checkpoint.background import AsyncSaver
from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.checkpoint.stateful import Stateful
from megapipe.config.config import Config
from megapipe.data.build import HeldOutBatches, build_batches
from megapipe.data.sources import Sources
from megapipe.data.tokenizer import Tokenizer
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import Preempted
from megapipe.launch import memory_folder, progress
from megapipe.launch.signals import StopRequest
from megapipe.layout.layout import Layout
from megapipe.observe.observer import Observer
from megapipe.train import run_folder
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.copy_check import ReplicaCheckCallback
from megapipe.train.callbacks.copying import MemoryCheckpointing
from megapipe.train.callbacks.exporting import Exporting
from megapipe.train.callbacks.loss_check import LossCheck
from megapipe.train.callbacks.profiling import Profiling
from megapipe.train.callbacks.reports import Reports
from megapipe.train.callbacks.sample_log import SampleLog
from megapipe.train.callbacks.saving import Checkpointing, Clock
from megapipe.train.callbacks.schedule_auto import ScheduleAuto
from megapipe.train.callbacks.several import CallbackList, check_callbacks
from megapipe.train.callbacks.stragglers import StragglerWatch
from megapipe.train.callbacks.telling import LauncherProgress
from megapipe.train.callbacks.timelines import Timelines
from megapipe.train.callbacks.validation import Validation
from megapipe.train.corpus import change_of_corpus, on_node_leaders_first, past_of, prepare_on_all
from megapipe.train.garbage import GCControl
from megapipe.train.judge import BadStep
from megapipe.train.kernels import agreed_kernels
from megapipe.train.opening import banner_lines
from megapipe.train.resume.choose import choose_start_point
from megapipe.train.resume.load import load, load_weights
from megapipe.train.resume.memory_copies import MemoryCheckpoints, memory_copies
from megapipe.train.resume.rewinding import Rewinding
from megapipe.train.source import changes_since, check_adapters, check_end
from megapipe.train.step.data import DataPosition
from megapipe.train.totals import Wishes
from megapipe.train.train_step import TrainStep
from megapipe.util.left_out import SkippedSamples


class Trainer:
    """Runs `config` on this process' part of the mesh.

    The process with `local_rank` 0 prepares the corpus for its node, after all checks that need no
    corpus; of processes that share a cache only one does. `stop` ends the run after a step.
    `callbacks` are called after those of megapipe, but before validation and saving; every rank is
    to give the same ones. Raises a :class:`MegapipeError` on every rank when any rank meets one
    while setting up, a failing compiler excepted (:func:`~megapipe.train.kernels.agreed_kernels`).
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        tokenizer: Tokenizer,
        *,
        local_rank: int,
        stop: StopRequest,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_callbacks(callbacks)
        self.config = config
        self.mesh = mesh
        self.stop = stop
        self.folder = run_folder.claim_run_folder(
            Path(config.run.folder) / config.run.name,
            mesh,
            local_rank=local_rank,
            checkpoints=run_folder.own_checkpoints(config),
        )
        try:
            self._set_up(layout, tokenizer, local_rank, callbacks)
        except BaseException:
            self.folder.release()
            raise

    def _set_up(
        self,
        layout: Layout,
        tokenizer: Tokenizer,
        local_rank: int,
        callbacks: Sequence[Callback],
    ) -> None:
        config, mesh = self.config, self.mesh
        memory = memory_copies(config, memory_folder.from_environment(os.environ), mesh)
        self._choose_source(memory, local_rank)
        kernels = agreed_kernels(config, layout, mesh, layout.schedule)
        corpus, held_out, left_out = self._prepare_data(tokenizer, local_rank)
        self.train_step = TrainStep(
            config,
            layout,
            mesh,
            kernels=kernels,
            document_end=tokenizer.eod,
            sources=len(self.training.names),
        )
        for callback in callbacks:
            if isinstance(callback, Stateful):
                self.train_step.state.add(callback)
        self.run_id = mesh.share(uuid.uuid4().hex)
        skipped = self._load_source(memory, left_out)
        self._make_saving(corpus)
        self.stragglers = StragglerWatch(mesh, config.log.stragglers_every)
        first, last = self._first_callbacks(corpus, skipped), self._last_callbacks(held_out, memory)
        self.callbacks = CallbackList(first, callbacks, last)
        self.context = Run(
            config=config,
            layout=layout,
            mesh=mesh,
            train_step=self.train_step,
            folder=self.folder.path,
            first_step=self.first_step,
            stop=self.stop,
            observer=self._open_reports(),
            callbacks=self.callbacks,
        )

    def _choose_source(self, memory: MemoryCheckpoints | None, local_rank: int) -> None:
        """Choose what the run begins with, and refuse what does not fit it."""
        told = progress.from_environment(os.environ)
        before = progress.read_request(told).before if told is not None else -1
        self.source = choose_start_point(
            self.config,
            self.folder.checkpoints,
            self.mesh,
            before=before if before >= 0 else None,
            memory=memory,
        )
        self.first_step = 0 if self.source.checkpoint is None else self.source.checkpoint.step
        self.reached = self.first_step
        self._telling = LauncherProgress(told) if told is not None and local_rank == 0 else None
        if self._telling is not None:
            self._telling.chosen(self.first_step)
        check_end(self.source, self.config)
        check_adapters(self.source, self.config)
        changes_since(self.source, self.config)

    def _prepare_data(
        self, tokenizer: Tokenizer, local_rank: int
    ) -> tuple[Sources, Sequence[HeldOutBatches], SkippedSamples]:
        """Prepare the corpus, and batches that go on where the checkpoint is; return it, the
        batches of validation, and samples that are left out."""
        config, mesh, checkpoint = self.config, self.mesh, self.source.checkpoint
        corpus = prepare_on_all(config, tokenizer, mesh, local_rank=local_rank)
        changed = change_of_corpus(checkpoint, corpus, config.data)
        self.changes = changes_since(self.source, config, changed)
        left_out = SkippedSamples.of(config.numbers.skip_samples)
        past = past_of(checkpoint, anew=self.changes.data_anew, left_out=left_out)
        self.training, held_out = on_node_leaders_first(
            mesh, local_rank, lambda: build_batches(config, tokenizer, corpus, past)
        )
        return corpus, held_out, left_out

    def _load_source(self, memory: MemoryCheckpoints | None, left_out: SkippedSamples) -> int:
        """Load what was chosen; return the steps before that had no update."""
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            if self.source.weights is not None:
                load_weights(self.source.weights, self.train_step.state, self.mesh)
            return 0
        copies = memory if self.source.in_memory else None
        load(checkpoint, self.train_step.state, self.mesh, copies)
        if self.changes.data_anew:
            self.train_step.position = DataPosition(self.first_step, 0)
            self.train_step.left_out = left_out
        if self.source.is_own:
            self.run_id = checkpoint.manifest.run_id
        return self.first_step - self.train_step.optimizer.count

    def _make_saving(self, corpus: Sources) -> None:
        """Make what saves checkpoints, and what goes back to them."""
        config, mesh = self.config, self.mesh
        on_disk = self.source.is_own and not self.source.in_memory
        own = self.source.checkpoint if on_disk else None
        failed = self.source.failed or FailedCheckpoints(self.folder.checkpoints)
        anew = any(each.key.startswith(("optimizer.", "model.")) for each in self.changes.to_report)
        if anew:
            failed.forget_reasons()
        background = None
        if config.checkpoint.background:
            background = AsyncSaver(mesh, mesh.store, pinned=mesh.device.type == "cuda")
        self.saving = Checkpointing(
            self.folder,
            Clock(60 * config.checkpoint.every_minutes),
            run_id=self.run_id,
            corpus=corpus,
            order=self.training.order,
            sound=[own.path] if own is not None else [],
            failed=failed.paths,
            background=background,
        )
        self.rewinding = Rewinding(self.saving, failed, None if anew else own)

    def _first_callbacks(self, corpus: Sources, skipped: int) -> list[Callback]:
        """Make the callbacks that are called before those of the user."""
        config = self.config
        reports = Reports(
            skipped=skipped,
            entropy=corpus.entropy,
            training=self.training,
            stragglers=self.stragglers,
        )
        found: list[Callback] = [Profiling(), self.stragglers, reports, Timelines()]
        if config.train.loss is not None:
            found.insert(0, LossCheck())
        if config.log.samples:
            found.append(SampleLog(self.training))
        if self._telling is not None:
            found.append(self._telling)
        if config.pipeline.schedule == "auto":
            found.append(ScheduleAuto(resumed=self.source.is_own))
        return found

    def _last_callbacks(
        self, held_out: Sequence[HeldOutBatches], memory: MemoryCheckpoints | None
    ) -> list[Callback]:
        """Make the callbacks that are called after those of the user: they validate and save."""
        found: list[Callback] = [Validation(held_out), self.saving]
        if self.config.numbers.check_copies_every:
            found.insert(0, ReplicaCheckCallback())
        if memory is not None:
            found.append(MemoryCheckpointing(memory, self.saving))
        if self.config.checkpoint.export_every:
            found.append(Exporting(self.saving))
        return found

    def _open_reports(self) -> Observer | None:
        """Open the reports of the run, on rank 0."""
        if self.mesh.rank != 0:
            return None
        resumed_at = self.first_step if self.source.is_own else None
        return run_folder.open_reports(self.folder.path, self.config, resumed_at)

    def run(self) -> None:
        """Train to ``train.stop_after`` or the end. Raises :class:`Preempted`, once all is saved
        for which there is time, if asked to stop."""
        with GCControl(self.config.run.collect_every) as garbage:
            lines = banner_lines(self.context, self.source, self.changes)
            for line in (*lines, *self.folder.notes, *self.training.notes()):
                self.context.note(line)
            self.callbacks.begin(self.context)
            self.stop.phase = "training"
            steps, end = self.config.train.steps, self.config.train.last_step
            number = self.first_step
            while number < end:
                self.reached = number = number + 1
                step = Step(number, last=number == end)
                try:
                    self._turn(step)
                except BadStep as problem:
                    number = self.rewinding.go_back(self.context, problem)
                    continue
                garbage.after(number)
                if step.stop:
                    self.stop.phase = "leaving"
                    who = self.callbacks.stopper(self.context)
                    if self._telling is not None:
                        self._telling.stopped(self.context, number, who)
                    if step.unsaved:
                        what = f"step {number} of {steps} is not saved: {step.unsaved}"
                    else:
                        what = f"saved step {number} of {steps}"
                    raise Preempted(f"stopped by {who}; {what}")
            if end < steps:
                self.context.note(
                    f"ended after step {end} of {steps}, as train.stop_after says; start again "
                    "with more, or null, to go on"
                )
            self.stop.phase = "leaving"
            self.callbacks.end(self.context)

    def _turn(self, step: Step) -> None:
        """Train a step, and call the hooks before and after it."""
        self.mesh.journal.trains(step.number)
        self.callbacks.before_step(self.context, step)
        with self.stragglers.timed(step):
            step.results = self.train_step.train(
                step.number - 1,
                self.training.rows,
                record=step.record,
                name=step.profile,
                settle=step.settle or step.validate or step.save or step.profile,
                wishes=self._wishes,
            )
        step.stop = any(result.wishes.stop for result in step.results)
        step.save |= any(result.wishes.save for result in step.results)
        self.callbacks.after_step(self.context, step)

    def _wishes(self) -> Wishes:
        """This rank's requests to all at the end of a step."""
        wished = self.callbacks.wishes(self.context)
        return wished._replace(stop=wished.stop or bool(self.stop))

    def close(self) -> None:
        """Flush and close the reports, and what callbacks have open, and let go of the folder."""
        self.callbacks.close(self.context)
        self.folder.release()
