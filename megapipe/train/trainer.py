"""A whole run: its setup, in order, and then its loop over the steps.

Everything besides training is done by callbacks (:mod:`megapipe.train.callbacks`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from megapipe.checkpoint.async_save import AsyncSaver
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
from megapipe.train.anomaly_detection import BadStep
from megapipe.train.banner import banner_lines
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.callback_list import CallbackList, check_callbacks
from megapipe.train.callbacks.checkpointing import Checkpointing, Clock
from megapipe.train.callbacks.exporting import Exporting
from megapipe.train.callbacks.launcher_progress import LauncherProgress
from megapipe.train.callbacks.loss_check import LossCheck
from megapipe.train.callbacks.memory_checkpointing import MemoryCheckpointing
from megapipe.train.callbacks.profiling import Profiling
from megapipe.train.callbacks.replica_check import ReplicaCheckCallback
from megapipe.train.callbacks.reports import Reports
from megapipe.train.callbacks.sample_log import SampleLog
from megapipe.train.callbacks.schedule_auto import ScheduleAuto
from megapipe.train.callbacks.stragglers import StragglerWatch
from megapipe.train.callbacks.timelines import Timelines
from megapipe.train.callbacks.validation import Validation
from megapipe.train.corpus import change_of_corpus, on_node_leaders_first, past_of, prepare_on_all
from megapipe.train.gc_control import GCControl
from megapipe.train.kernel_selection import agreed_kernels
from megapipe.train.resume.choose import choose_start_point
from megapipe.train.resume.load import load, load_weights
from megapipe.train.resume.memory_checkpoints import MemoryCheckpoints, memory_copies
from megapipe.train.resume.rewinding import Rewinding
from megapipe.train.start_point import changes_since, check_adapters, check_end
from megapipe.train.step.data import DataPosition
from megapipe.train.step_stats import RankRequests
from megapipe.train.train_step import TrainStep
from megapipe.util.skipped_samples import SkippedSamples


class Trainer:
    """Runs `config` on this process' part of the mesh.

    The process with `local_rank` 0 prepares the corpus for its node, after all checks that need no
    corpus. If nodes share a cache, only one process prepares it. `stop` ends the run after a step.
    `callbacks` are called after megapipe's, but before validation and saving; every rank must pass
    the same ones. An error in the setup of any rank is raised on every rank as a
    :class:`MegapipeError`, except for a failing compiler
    (:func:`~megapipe.train.kernel_selection.agreed_kernels`).
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
        corpus, held_out, skipped_samples = self._prepare_data(tokenizer, local_rank)
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
        skipped = self._load_source(memory, skipped_samples)
        self._make_saving(corpus)
        self.stragglers = StragglerWatch(mesh, config.log.straggler_window)
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
        """Choose the start point, and refuse one that does not fit the run."""
        progress_file = progress.from_environment(os.environ)
        before = progress.read_request(progress_file).before if progress_file is not None else -1
        self.source = choose_start_point(
            self.config,
            self.folder.checkpoints,
            self.mesh,
            before=before if before >= 0 else None,
            memory=memory,
        )
        self.first_step = 0 if self.source.checkpoint is None else self.source.checkpoint.step
        self.reached = self.first_step
        self._launcher_progress = (
            LauncherProgress(progress_file)
            if progress_file is not None and local_rank == 0
            else None
        )
        if self._launcher_progress is not None:
            self._launcher_progress.chosen(self.first_step)
        check_end(self.source, self.config)
        check_adapters(self.source, self.config)
        changes_since(self.source, self.config)

    def _prepare_data(
        self, tokenizer: Tokenizer, local_rank: int
    ) -> tuple[Sources, Sequence[HeldOutBatches], SkippedSamples]:
        """Prepare the corpus, and batches that continue at the checkpoint's position. Return the
        corpus, validation batches, and skipped samples."""
        config, mesh, checkpoint = self.config, self.mesh, self.source.checkpoint
        corpus = prepare_on_all(config, tokenizer, mesh, local_rank=local_rank)
        changed = change_of_corpus(checkpoint, corpus, config.data)
        self.changes = changes_since(self.source, config, changed)
        skipped_samples = SkippedSamples.of(config.health.skip_samples)
        past = past_of(checkpoint, anew=self.changes.data_anew, skipped_samples=skipped_samples)
        self.training, held_out = on_node_leaders_first(
            mesh, local_rank, lambda: build_batches(config, tokenizer, corpus, past)
        )
        return corpus, held_out, skipped_samples

    def _load_source(
        self, memory: MemoryCheckpoints | None, skipped_samples: SkippedSamples
    ) -> int:
        """Load the start point; return the number of its steps that made no update."""
        checkpoint = self.source.checkpoint
        if checkpoint is None:
            if self.source.weights is not None:
                load_weights(self.source.weights, self.train_step.state, self.mesh)
            return 0
        copies = memory if self.source.in_memory else None
        load(checkpoint, self.train_step.state, self.mesh, copies)
        if self.changes.data_anew:
            self.train_step.position = DataPosition(self.first_step, 0)
            self.train_step.skipped_samples = skipped_samples
        if self.source.is_own:
            self.run_id = checkpoint.manifest.run_id
        return self.first_step - self.train_step.optimizer.count

    def _make_saving(self, corpus: Sources) -> None:
        """Make the callback that saves checkpoints, and the object that rewinds to them."""
        config, mesh = self.config, self.mesh
        on_disk = self.source.is_own and not self.source.in_memory
        own = self.source.checkpoint if on_disk else None
        failed = self.source.failed or FailedCheckpoints(self.folder.checkpoints)
        anew = any(each.key.startswith(("optimizer.", "model.")) for each in self.changes.to_report)
        if anew:
            failed.forget_reasons()
        background = None
        if config.checkpoint.async_save:
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
        """Make the callbacks that are called before user-defined ones."""
        config = self.config
        reports = Reports(
            skipped=skipped,
            entropy=corpus.entropy,
            training=self.training,
            stragglers=self.stragglers,
        )
        found: list[Callback] = [Profiling(), self.stragglers, reports, Timelines()]
        if config.train.loss_function is not None:
            found.insert(0, LossCheck())
        if config.log.sample_ids:
            found.append(SampleLog(self.training))
        if self._launcher_progress is not None:
            found.append(self._launcher_progress)
        if config.pipeline.schedule == "auto":
            found.append(ScheduleAuto(resumed=self.source.is_own))
        return found

    def _last_callbacks(
        self, held_out: Sequence[HeldOutBatches], memory: MemoryCheckpoints | None
    ) -> list[Callback]:
        """Make the callbacks that are called after user-defined ones: they validate and save."""
        found: list[Callback] = [Validation(held_out), self.saving]
        if self.config.health.replica_check_every:
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
        """Train to ``train.stop_after`` or the end. If asked to stop, save if there is time for it,
        and raise :class:`Preempted`."""
        with GCControl(self.config.run.gc_interval) as garbage:
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
                    if self._launcher_progress is not None:
                        self._launcher_progress.stopped(self.context, number, who)
                    if step.unsaved:
                        what = f"step {number} of {steps} is not saved: {step.unsaved}"
                    else:
                        what = f"saved step {number} of {steps}"
                    raise Preempted(f"stopped by {who}; {what}")
            if end < steps:
                self.context.note(
                    f"stopped after step {end} of {steps} (train.stop_after); to continue, "
                    "raise it or set it to null"
                )
            self.stop.phase = "leaving"
            self.callbacks.end(self.context)

    def _turn(self, step: Step) -> None:
        """Train one step, and call the hooks before and after the step."""
        self.mesh.journal.trains(step.number)
        self.callbacks.before_step(self.context, step)
        with self.stragglers.timed(step):
            step.results = self.train_step.train(
                step.number - 1,
                self.training.rows,
                record=step.record,
                name=step.profile,
                settle=step.settle or step.validate or step.save or step.profile,
                requests=self._requests,
            )
        step.stop = any(result.requests.stop for result in step.results)
        step.save |= any(result.requests.save for result in step.results)
        self.callbacks.after_step(self.context, step)

    def _requests(self) -> RankRequests:
        """Collect this rank's requests to all ranks at the end of a step."""
        wished = self.callbacks.requests(self.context)
        return wished._replace(stop=wished.stop or bool(self.stop))

    def close(self) -> None:
        """Flush and close the reports and the callbacks' files, and release the folder."""
        self.callbacks.close(self.context)
        self.folder.release()
