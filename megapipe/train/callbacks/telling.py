"""Tells a launcher how far the run has come (:mod:`megapipe.launch.progress`)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from megapipe.launch.progress import Progress, write
from megapipe.train.callbacks.callback import Callback, Run, Step


class Telling(Callback):
    """Writes the number of steps that are done into the launcher's file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def begin(self, run: Run) -> None:
        self._tell(run, run.first_step)

    def after_step(self, run: Run, step: Step) -> None:
        self._tell(run, step.number)

    def after_rewind(self, run: Run, step: int) -> None:
        self._tell(run, step)

    def _tell(self, run: Run, step: int) -> None:
        with contextlib.suppress(OSError):  # a run does not end for want of a file
            write(self._file, Progress(run.first_step, step))
