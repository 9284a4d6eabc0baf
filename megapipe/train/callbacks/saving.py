"""Checkpoints: every so many steps, by the clock, where somebody asks, and at the end."""

from __future__ import annotations

import time
from pathlib import Path

from megapipe.checkpoint.retention import retain
from megapipe.data.sources import Sources
from megapipe.distributed.agreement import all_or_none
from megapipe.errors import MegapipeError
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.validation import is_due
from megapipe.train.totals import Wishes


class Saving(Callback):
    """Saves into the folder `checkpoints`, and deletes older ones there (``checkpoint.keep``).

    `clock` says when a checkpoint is due by time: that of rank 0 decides.
    """

    def __init__(
        self, checkpoints: Path, clock: Clock, *, run_id: str, corpus: Sources, order: str
    ) -> None:
        self.checkpoints = checkpoints
        self.clock = clock
        self._run_id = run_id
        self._corpus = corpus
        self._order = order
        self.newest: Path | None = None
        """The checkpoint that was saved last."""

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
        path = self.newest = run.train_step.save(
            self.checkpoints,
            step,
            run_id=self._run_id,
            digests={"corpus": self._corpus.digest, "content": self._corpus.content},
            order=self._order,
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


class Clock:
    """Says when `seconds` have passed; 0: never."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Count the seconds from now on."""
        self._began = time.monotonic()

    @property
    def due(self) -> bool:
        return 0 < self._seconds <= time.monotonic() - self._began
