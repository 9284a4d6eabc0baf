"""Communication with the launcher about the run's progress (:mod:`megapipe.launch.progress`)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megapipe.launch.progress import Progress, read_request, write
from megapipe.train.callbacks.callback import A_SIGNAL, Callback, Run, Step
from megapipe.train.step_stats import RankRequests


class LauncherProgress(Callback):
    """Writes the number of steps done into the launcher's file, and stops the run if the launcher
    asks for it."""

    @property
    def who(self) -> str:
        return "the launcher, as nodes have come"

    def __init__(self, file: Path) -> None:
        self._file = file

    def chosen(self, first_step: int) -> None:
        """Report the step from which this start begins, before its checkpoint is loaded."""
        self._write(Progress(first_step))

    def begin(self, run: Run) -> None:
        self._report(run, run.first_step)

    def requests(self, run: Run) -> RankRequests:
        return RankRequests(stop=read_request(self._file).regroup == 1)

    def after_step(self, run: Run, step: Step) -> None:
        self._report(run, step.number)

    def after_rewind(self, run: Run, step: int) -> None:
        self._report(run, step)

    def stopped(self, run: Run, step: int, who: str) -> None:
        """Report that the run has stopped after a step because `who` requested it."""
        self._report(run, step, ends=who not in (A_SIGNAL, self.who))

    def _report(self, run: Run, step: int, *, ends: bool = False) -> None:
        self._write(Progress(run.first_step, step, int(ends)))

    def _write(self, progress: Progress) -> None:
        with contextlib.suppress(OSError):  # a run does not end for a missing file
            write(self._file, progress)
