"""Signals that ask the job to save and stop; a second one ends the process at once.

=========  ============================================================================
signal     meaning
=========  ============================================================================
SIGINT     Ctrl-C. While there is nothing to save yet: end. Then: save and stop
SIGTERM    a scheduler or launcher: save and stop
SIGUSR1    a scheduler that gives notice: save and stop; as often as it likes
=========  ============================================================================

Python runs a signal's handler when the main thread comes back from C++, which may be never: it may
wait for a peer in a collective. So a thread reads the signals as they arrive
(`signal.set_wakeup_fd`), and a second SIGINT or SIGTERM ends the process wherever it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Literal

AGAIN_S = 1.0
"""A signal that comes again within this time counts once: launchers hand on what a terminal has
sent to all processes."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Becomes true when a stop signal arrives; read at step boundaries, never acted on inside one.

    A context manager: signals mean what they meant before when it ends. To be made in the main
    thread. With `speaks` it tells the user what a first Ctrl-C does.
    """

    def __init__(self, *, speaks: bool = False) -> None:
        self.signal: signal.Signals | None = None
        self.phase: Literal["setup", "training", "leaving"] = "setup"
        """There is nothing to save yet, a step to save, or nothing left to save."""
        self._speaks = speaks
        self._last: float | None = None
        """When the last SIGINT or SIGTERM came that counts, monotonic seconds."""
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._handle) for number in STOP_SIGNALS
        }
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()

    def __enter__(self) -> StopRequest:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.close(self._writer)

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Note the signal in the main thread, before that goes on."""
        self.signal = self.signal or signal.Signals(number)

    def _watch(self, reader: int) -> None:
        while data := os.read(reader, 1):
            if data[0] in STOP_SIGNALS:
                self._arrived(signal.Signals(data[0]))
        os.close(reader)

    def _arrived(self, number: signal.Signals) -> None:
        self.signal = self.signal or number
        if number == signal.SIGUSR1 or (number == signal.SIGTERM and self.phase == "leaving"):
            return  # a launcher ends what is left of a job; all is saved, reports may be on the way
        now, first = time.monotonic(), self._last is None
        if self._last is not None and now - self._last < AGAIN_S:
            return
        self._last = now
        if not first or (number == signal.SIGINT and self.phase != "training"):
            os._exit(128 + number)
        if number == signal.SIGINT and self._speaks:
            with contextlib.suppress(OSError, ValueError):
                text = "megapipe: saves after this step and ends; Ctrl-C again ends at once"
                print(text, file=sys.stderr, flush=True)
