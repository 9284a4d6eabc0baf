"""Signals that ask the job to save and stop."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Becomes true when a stop signal arrives; read at step boundaries, never acted on inside one.

    A second SIGTERM ends the process at once, as without a handler.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = signal.Signals(number)

    def __bool__(self) -> bool:
        return self.signal is not None
