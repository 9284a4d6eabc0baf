"""Tells a launcher how far the run has come, and hears it (:mod:`megapipe.launch.progress`)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megapipe.launch.progress import Progress, read_request, write
from megapipe.train.callbacks.callback import A_SIGNAL, Callback, Run, Step
from megapipe.train.totals import Wishes


class LauncherProgress(Callback):
    """Writes the number of steps that are done into the launcher's file, and stops the run where
    that asks for it."""

    @property
    def who(self) -> str:
        return "the launcher, as nodes have come"

    def __init__(self, file: Path) -> None:
        self._file = file

    def chosen(self, first_step: int) -> None:
        """This start is about to load its checkpoint, which may end the process."""
        self._write(Progress(first_step))

    def begin(self, run: Run) -> None:
        self._tell(run, run.first_step)

    def wishes(self, run: Run) -> Wishes:
        return Wishes(stop=read_request(self._file).regroup == 1)

    def after_step(self, run: Run, step: Step) -> None:
        self._tell(run, step.number)

    def after_rewind(self, run: Run, step: int) -> None:
        self._tell(run, step)

    def stopped(self, run: Run, step: int, who: str) -> None:
        """The run has stopped after a step because `who` wished so."""
        self._tell(run, step, ends=who not in (A_SIGNAL, self.who))

    def _tell(self, run: Run, step: int, *, ends: bool = False) -> None:
        self._write(Progress(run.first_step, step, int(ends)))

    def _write(self, progress: Progress) -> None:
        with contextlib.suppress(OSError):  # a run does not end for want of a file
            write(self._file, progress)
