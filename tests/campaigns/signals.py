"""A signal that a rank sends at a time within a step, to itself or to its launcher."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from megapipe.train.callbacks import Run
from tests.campaigns.rank import Fault


class AtTime(Fault):
    """Sends signal `number`, by default -9, after `delay` seconds of the step, or at the end of the
    run if that comes first; to the process that has started this one with `to_launcher`."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        step: int,
        delay: float,
        number: int = signal.SIGKILL,
        to_launcher: bool = False,
    ) -> None:
        super().__init__(folder, rank, step)
        self._delay, self._number, self._to_launcher = delay, number, to_launcher
        self._once = threading.Lock()
        self._is_near = False

    def arm(self, run: Run) -> None:
        self._is_near = True
        timer = threading.Timer(self._delay, self._send)
        timer.daemon = True
        timer.start()

    def end(self, run: Run) -> None:
        if self._is_near:
            self._send()

    def _send(self) -> None:
        if self._once.acquire(blocking=False):  # for good
            self.struck()
            os.kill(os.getppid() if self._to_launcher else os.getpid(), self._number)
