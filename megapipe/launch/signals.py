"""Signals that ask the job to save and stop; a second one ends the job at once.

=========  ============================================================================
signal     meaning
=========  ============================================================================
SIGINT     Ctrl-C. While there is nothing to save yet: end. Then: save and stop
SIGTERM    a scheduler or launcher: save and stop; end where there is nothing to save
SIGUSR1    a scheduler that gives notice: as SIGTERM; as often as it likes
SIGHUP     a terminal that closes: as SIGUSR1, for shell and system may both send it.
           Where it is ignored from the beginning, as under nohup, it stays so
=========  ============================================================================

A SIGINT or SIGTERM within :data:`AGAIN_S` of the one before counts as that. One that ends a rank at
once ends the others too, as far as the rank can tell them. A launcher that is gone counts as
SIGTERM, as nobody would end its processes any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal, TypeVar

from megapipe.command_line import fresh_line
from megapipe.errors import Preempted

AGAIN_S = 1.0
"""SIGINT and SIGTERM that come again within this time count once: launchers hand on what a terminal
has sent to all processes."""
LOOK_S = 1.0
"""Time between two looks at the process that started this one."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
NOTICES = (signal.SIGHUP, signal.SIGUSR1)
"""Those that may come again without a meaning of their own."""
Self = TypeVar("Self", bound="Listener")


class Listener:
    """Hears signals as they arrive, in a thread that calls :meth:`arrived`.

    Python runs a signal's handler when the main thread comes back from C++, which may be never: it
    may wait for a peer in a collective. So a thread reads the signals (`signal.set_wakeup_fd`).

    A context manager: signals mean what they meant before when it ends. To be made in the main
    thread. The thread begins with :meth:`listen`; before that :meth:`handle` alone is called.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._numbers = [number for number in numbers if not _is_kept_from(number)]
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._last: float | None = None
        """When a signal was last counted, monotonic seconds."""
        self._counted = 0
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self.handle) for number in self._numbers
        }

    def listen(self) -> None:
        """Begin to hear signals."""
        threading.Thread(target=self._read, args=(self._reader,), daemon=True).start()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Let signals mean what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.close(self._writer)

    def ignore(self) -> None:
        """Let signals mean nothing from now on, also after :meth:`restore`."""
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def count(self) -> int:
        """Count a signal that has just come; returns its number, from 1 on, or 0 if it comes
        within :data:`AGAIN_S` of the one before, and does not count."""
        now = time.monotonic()
        if self._last is not None and now - self._last < AGAIN_S:
            return 0
        self._last = now
        self._counted += 1
        return self._counted

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Called in the main thread, before that goes on in Python."""

    def arrived(self, number: signal.Signals) -> None:
        """Called in a thread, at once."""
        raise NotImplementedError

    def look(self) -> None:
        """Called in the thread now and then."""

    def _read(self, reader: int) -> None:
        while True:
            if not select.select([reader], [], [], LOOK_S)[0]:
                self.look()
            elif not (data := os.read(reader, 1)):
                break
            elif data[0] in self._numbers:
                self.arrived(signal.Signals(data[0]))
        os.close(reader)


class Interrupts(Listener):
    """Ends the process at SIGINT, wherever its main thread is."""

    def __init__(self, numbers: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
        self.interrupt: Callable[[signal.Signals], object] = lambda number: None
        """Tells other processes, which takes it a moment, before this one ends."""
        self._interrupted = False
        super().__init__(numbers)
        self.listen()

    def arrived(self, number: signal.Signals) -> None:
        if self.count():
            self.end_at_once(number)

    def end_at_once(self, number: signal.Signals) -> None:
        """End the process through :attr:`interrupt`; the next time without it."""
        if self._interrupted:
            os._exit(128 + number)
        self._interrupted = True
        # in a thread of its own: this one has to hear the next signal
        threading.Thread(target=self._end_at_once, args=(number,), daemon=True).start()

    def _end_at_once(self, number: signal.Signals) -> None:
        try:
            self.interrupt(number)
        finally:
            os._exit(128 + number)


class StopRequest(Interrupts):
    """Becomes true when a stop signal arrives; read at step boundaries, never acted on inside one.

    Before there is anything to save all but SIGINT end the job through `leave`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.since: float | None = None
        """When it came, monotonic seconds."""
        self.phase: Literal["setup", "training", "leaving"] = "setup"
        """There is nothing to save yet, a step to save, or nothing left to save."""
        self.speaks = False
        """Whether this process tells the user what a first Ctrl-C does."""
        self.launcher: int | None = None
        """The process that started this one, if that is to end it; else None."""
        self.steady = threading.Lock()
        """Whoever holds it is not ended by `leave`."""
        self._leave: Callable[[Preempted], int] | None = None
        self._leaves = threading.Lock()
        super().__init__(STOP_SIGNALS)

    @property
    def leave(self) -> Callable[[Preempted], int] | None:
        """Ends the job in the phase ``setup``, whatever the main thread waits for, and returns the
        exit code; None: the job ends after its first step. A request that came before it was set
        ends the job when it is."""
        return self._leave

    @leave.setter
    def leave(self, leave: Callable[[Preempted], int]) -> None:
        self._leave = leave
        if self.signal is not None:
            self._ask(self.signal)

    def __bool__(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        self._note(signal.Signals(number))

    def look(self) -> None:
        if self.launcher is not None and os.getppid() != self.launcher:
            self.launcher = None
            self._ask(signal.SIGTERM)

    def arrived(self, number: signal.Signals) -> None:
        self._ask(number)
        if number in NOTICES or (number == signal.SIGTERM and self.phase == "leaving"):
            return  # a launcher ends what is left of a job; all is saved, reports may be on the way
        count = self.count()
        if count == 0:
            return
        if count > 1 or (number == signal.SIGINT and self.phase != "training"):
            self.end_at_once(number)
        elif number == signal.SIGINT and self.speaks:
            with contextlib.suppress(OSError, ValueError):
                text = (
                    "megapipe: saves after this step and ends; Ctrl-C again, more than "
                    f"{AGAIN_S:g} s after this one, ends at once"
                )
                print(f"{fresh_line(sys.stderr)}{text}", file=sys.stderr, flush=True)

    def _ask(self, number: signal.Signals) -> None:
        """Ask for a stop; the first time, while there is nothing to save, end."""
        self._note(number)
        unsaved = self.phase == "setup" and number != signal.SIGINT and self.leave is not None
        if unsaved and self._leaves.acquire(blocking=False):
            # in a thread of its own: this one has to hear a second signal
            threading.Thread(target=self._end, args=(number,), daemon=True).start()

    def _note(self, number: signal.Signals) -> None:
        if self.signal is None:
            self.since, self.signal = time.monotonic(), number

    def _end(self, number: signal.Signals) -> None:
        with self.steady:
            leave = self.leave
        assert leave is not None
        code = Preempted.exit_code
        try:
            code = leave(Preempted(f"stopped by {number.name} before the first step"))
        finally:
            os._exit(code)


def _is_kept_from(number: signal.Signals) -> bool:
    """Whether the user wants a process not to hear a signal. (Of other signals that says nothing:
    shells let what runs in the background ignore SIGINT, job scripts what is meant for ranks.)"""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
