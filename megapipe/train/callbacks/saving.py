"""Checkpoints: every so many steps, by the clock, where somebody asks, and at the end."""

from __future__ import annotations

import time
from pathlib import Path

from megapipe.checkpoint.retention import retain
from megapipe.checkpoint.writer import Meta, save
from megapipe.cli import flatten
from megapipe.data.own import OwnData
from megapipe.data.prepare import Prepared
from megapipe.distributed.agreement import all_or_none
from megapipe.errors import MegapipeError
from megapipe.train import checkpoint_io
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.validation import is_due
from megapipe.train.totals import Wishes


class Saving(Callback):
    """Saves into the folder `checkpoints`, and deletes there what is older than is to be kept.

    `clock` says when a checkpoint is due by time: that of rank 0 decides.
    """

    def __init__(
        self, checkpoints: Path, clock: Clock, *, run_id: str, corpus: Prepared | OwnData
    ) -> None:
        self.checkpoints = checkpoints
        self.clock = clock
        self._run_id = run_id
        self._corpus = corpus

    def begin(self, run: Run) -> None:
        self.clock.restart()

    def before_step(self, run: Run, step: Step) -> None:
        step.save |= step.last or is_due(run.config.checkpoint.every, step.number)

    def wishes(self, run: Run) -> Wishes:
        return Wishes(save=run.mesh.rank == 0 and self.clock.due)

    def after_step(self, run: Run, step: Step) -> None:
        if step.save or step.stop:
            run.check_settled()
            self.save(run, step.number)

    def save(self, run: Run, step: int) -> None:
        """Save the state after `step` steps. Raises :class:`CheckpointError` on all ranks."""
        run.callbacks.before_save(run, step)
        path = save(
            self.checkpoints,
            step=step,
            pieces=checkpoint_io.pieces(run.train_step.optimizer),
            meta=self._meta(run, step),
            group=run.mesh,
        )
        run.note(f"saved {path}")
        error = None
        if run.mesh.rank == 0:
            try:
                retain(self.checkpoints, run.config.checkpoint.keep, path)
            except MegapipeError as problem:
                error = problem
        all_or_none(run.mesh, error)
        self.clock.restart()

    def _meta(self, run: Run, step: int) -> Meta:
        axes = ("pp", "dp", "cp", "tp", "chunks")
        return Meta(
            run_id=self._run_id,
            layout={name: getattr(run.layout, name) for name in axes},
            coordinates={
                "step": step,
                "samples": run.train_step.samples(step),
                **run.train_step.coordinates(),
            },
            config=flatten(run.config),
            digests={"corpus": self._corpus.digest, "content": self._corpus.content},
        )


class Clock:
    """Says when `seconds` have passed; 0: never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Begin to wait."""
        self._began = time.monotonic()

    @property
    def due(self) -> bool:
        return 0 < self._seconds <= time.monotonic() - self._began
