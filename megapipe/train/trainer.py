"""A whole run: what it needs, one after the other, and then the loop of its steps.

What a run does besides training is done by callbacks (:mod:`megapipe.train.callbacks`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from megapipe.checkpoint.background import Background
from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.config import Config
from megapipe.data.build import build_batches
from megapipe.data.tokenizer import Tokenizer
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import Preempted
from megapipe.launch import memory_folder, progress
from megapipe.launch.signals import StopRequest
from megapipe.layout.layout import Layout
from megapipe.left_out import LeftOut
from megapipe.train import run_folder
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.copy_check import CopyCheck
from megapipe.train.callbacks.copying import Copying
from megapipe.train.callbacks.exporting import Exporting
from megapipe.train.callbacks.loss_check import LossCheck
from megapipe.train.callbacks.profiling import Profiling
from megapipe.train.callbacks.reports import Reports
from megapipe.train.callbacks.sample_log import SampleLog
from megapipe.train.callbacks.saving import Clock, Saving
from megapipe.train.callbacks.schedule_auto import ScheduleAuto
from megapipe.train.callbacks.several import Callbacks, check_callbacks
from megapipe.train.callbacks.stragglers import StragglerWatch
from megapipe.train.callbacks.telling import Telling
from megapipe.train.callbacks.timelines import Timelines
from megapipe.train.callbacks.validation import Validation
from megapipe.train.corpus import change_of_corpus, on_all, past_of, prepare_on_all
from megapipe.train.garbage import Garbage
from megapipe.train.judge import Unsound
from megapipe.train.kernels import agreed_kernels
from megapipe.train.memory_copies import memory_copies
from megapipe.train.opening import opening
from megapipe.train.resume import choose, load, load_weights
from megapipe.train.rewinding import Rewinding
from megapipe.train.source import changes_since, check_adapters, check_end
from megapipe.train.step import Position, TrainStep
from megapipe.train.totals import Wishes


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
        self.folder = run_folder.take(
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
        told = progress.told(os.environ)
        before = progress.read_request(told).before if told is not None else -1
        memory = memory_copies(config, memory_folder.told(os.environ), mesh)
        self.source = choose(
            config,
            self.folder.checkpoints,
            mesh,
            before=before if before >= 0 else None,
            memory=memory,
        )
        self.first_step = 0 if self.source.checkpoint is None else self.source.checkpoint.step
        self.reached = self.first_step
        self._telling = Telling(told) if told is not None and local_rank == 0 else None
        if self._telling is not None:
            self._telling.chosen(self.first_step)
        check_end(self.source, config)
        check_adapters(self.source, config)
        changes_since(self.source, config)
        kernels = agreed_kernels(config, layout, mesh, layout.schedule)
        corpus = prepare_on_all(config, tokenizer, mesh, local_rank=local_rank)
        changed = change_of_corpus(self.source.checkpoint, corpus, config.data)
        self.changes = changes_since(self.source, config, changed)
        left_out = LeftOut.of(config.numbers.skip_samples)
        past = past_of(self.source.checkpoint, anew=self.changes.data_anew, left_out=left_out)
        self.training, held_out = on_all(
            mesh, local_rank, lambda: build_batches(config, tokenizer, corpus, past)
        )
        self.train_step = TrainStep(
            config,
            layout,
            mesh,
            kernels=kernels,
            document_end=tokenizer.eod,
            sources=len(self.training.names),
        )
        self.run_id = mesh.share(uuid.uuid4().hex)
        skipped = 0
        if self.source.checkpoint is not None:
            copies = memory if self.source.in_memory else None
            load(self.source.checkpoint, config, self.train_step, mesh, copies)
            if self.changes.data_anew:
                self.train_step.position = Position(self.first_step, 0)
                self.train_step.left_out = left_out
            skipped = self.first_step - self.train_step.optimizer.count
            if self.source.is_own:
                self.run_id = self.source.checkpoint.manifest.run_id
        elif self.source.weights is not None:
            load_weights(self.source.weights, self.train_step, mesh)
        resumed_at = self.first_step if self.source.is_own else None
        on_disk = self.source.is_own and not self.source.in_memory
        own = self.source.checkpoint if on_disk else None
        failed = self.source.failed or FailedCheckpoints(self.folder.checkpoints)
        anew = any(each.key.startswith(("optimizer.", "model.")) for each in self.changes.told)
        if anew:
            failed.forget_reasons()
        self.saving = Saving(
            self.folder,
            Clock(60 * config.checkpoint.every_minutes),
            run_id=self.run_id,
            corpus=corpus,
            order=self.training.order,
            sound=[own.path] if own is not None else [],
            failed=failed.paths,
            background=(
                Background(mesh, mesh.store, pinned=mesh.device.type == "cuda")
                if config.checkpoint.background
                else None
            ),
        )
        self.rewinding = Rewinding(self.saving, failed, None if anew else own)
        self.stragglers = StragglerWatch(mesh, config.log.stragglers_every)
        first: list[Callback] = [
            Profiling(),
            self.stragglers,
            Reports(
                skipped=skipped,
                entropy=corpus.entropy,
                training=self.training,
                stragglers=self.stragglers,
            ),
            Timelines(),
        ]
        if config.train.loss is not None:
            first.insert(0, LossCheck())
        if config.log.samples:
            first.append(SampleLog(self.training))
        if self._telling is not None:
            first.append(self._telling)
        if config.pipeline.schedule == "auto":
            first.append(ScheduleAuto(resumed=self.source.is_own))
        last: list[Callback] = [Validation(held_out), self.saving]
        if config.numbers.check_copies_every:
            last.insert(0, CopyCheck())
        if memory is not None:
            last.append(Copying(memory, self.saving))
        if config.checkpoint.export_every:
            last.append(Exporting(self.saving))
        self.callbacks = Callbacks(first, callbacks, last)
        self.context = Run(
            config=config,
            layout=layout,
            mesh=mesh,
            train_step=self.train_step,
            folder=self.folder.path,
            first_step=self.first_step,
            stop=self.stop,
            observer=(
                run_folder.open_reports(self.folder.path, config, resumed_at)
                if mesh.rank == 0
                else None
            ),
            callbacks=self.callbacks,
        )

    def run(self) -> None:
        """Train to ``train.stop_after`` or the end. Raises :class:`Preempted`, once all is saved
        for which there is time, if asked to stop."""
        with Garbage(self.config.run.collect_every) as garbage:
            lines = opening(self.context, self.source, self.changes)
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
                except Unsound as problem:
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
