"""Signals that ask the job to save and stop; a second one ends the job at once.

=========  ============================================================================
signal     meaning
=========  ============================================================================
SIGINT     Ctrl-C. While there is nothing to save yet: end. Then: save and stop
SIGTERM    a scheduler or launcher: save and stop; end if there is nothing to save
SIGUSR1    a scheduler's early notice: as SIGTERM; a second one changes nothing
SIGHUP     a terminal that closes: like SIGUSR1, as shell and system may both send it.
           If it is ignored from the beginning, as under nohup, it stays ignored
=========  ============================================================================

A SIGINT or SIGTERM within :data:`REPEAT_S` seconds of the previous SIGINT or SIGTERM counts as the
same request. A signal that ends one rank at once ends the other ranks too, if the rank can inform
them. The end of the launcher counts as SIGTERM, because nobody else would end the ranks.
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

REPEAT_S = 1.0
"""Seconds within which several SIGINT or SIGTERM count as one: a terminal sends a signal to all
processes, and launchers pass the same signal on."""
LOOK_S = 1.0
"""Seconds between two checks whether the parent process still runs."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
NOTICES = (signal.SIGHUP, signal.SIGUSR1)
"""Signals of which a second one changes nothing."""
Self = TypeVar("Self", bound="Listener")


class Listener:
    """Handles signals as soon as they arrive, in a thread that calls :meth:`arrived`.

    Python runs a signal's handler only when the main thread returns from C++. That may be never,
    for example if it waits for a peer in a collective. So a separate thread reads the signals
    (`signal.set_wakeup_fd`).

    As a context manager it restores the previous signal handlers at its end. Create it in the main
    thread. :meth:`listen` starts the thread; before that only :meth:`handle` is called.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._numbers = [number for number in numbers if not _is_kept_from(number)]
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._last: float | None = None
        """Time of the last counted signal, monotonic seconds."""
        self._counted = 0
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self.handle) for number in self._numbers
        }

    def listen(self) -> None:
        """Start the thread that handles signals."""
        threading.Thread(target=self._read, args=(self._reader,), daemon=True).start()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore the signal handlers from before this object was created."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        os.close(self._writer)

    def ignore(self) -> None:
        """Ignore all signals from now on, also after :meth:`restore`."""
        self._before = dict.fromkeys(self._before, signal.SIG_IGN)
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def count(self) -> int:
        """Count a signal that has just arrived. Return the count, from 1 on, or 0 if the signal
        does not count: within :data:`REPEAT_S` seconds of the previous counted one."""
        now = time.monotonic()
        if self._last is not None and now - self._last < REPEAT_S:
            return 0
        self._last = now
        self._counted += 1
        return self._counted

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, when that thread next runs Python code."""

    def arrived(self, number: signal.Signals) -> None:
        """Handle a signal at once, in the listening thread."""
        raise NotImplementedError

    def look(self) -> None:
        """Do periodic work. The listening thread calls this about every LOOK_S seconds."""

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
    """Ends the process at SIGINT, whatever the main thread does."""

    def __init__(self, numbers: Sequence[signal.Signals] = (signal.SIGINT,)) -> None:
        self.interrupt: Callable[[signal.Signals], object] = lambda number: None
        """Function that is called with the signal before this process ends, to inform other
        processes; it may take a moment."""
        self._interrupted = False
        super().__init__(numbers)
        self.listen()

    def arrived(self, number: signal.Signals) -> None:
        if self.count():
            self.end_at_once(number)

    def end_at_once(self, number: signal.Signals) -> None:
        """End the process after calling :attr:`interrupt`; at a second call, end it at once."""
        if self._interrupted:
            os._exit(128 + number)
        self._interrupted = True
        # in a new thread: the listening thread has to handle the next signal
        threading.Thread(target=self._end_at_once, args=(number,), daemon=True).start()

    def _end_at_once(self, number: signal.Signals) -> None:
        try:
            self.interrupt(number)
        finally:
            os._exit(128 + number)


class StopRequest(Interrupts):
    """A flag that becomes true when a stop signal arrives; training reads it at step boundaries
    only.

    Before there is anything to save, every signal except SIGINT ends the job through `leave`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.since: float | None = None
        """Time of the request, monotonic seconds."""
        self.phase: Literal["setup", "training", "leaving"] = "setup"
        """setup: nothing to save yet; training: steps to save; leaving: everything is saved."""
        self.speaks = False
        """Whether this process explains the first Ctrl-C's effect in a line on stderr."""
        self.launcher: int | None = None
        """Id of the parent process, if this process must stop when the parent ends; else None."""
        self.steady = threading.Lock()
        """Lock that another thread holds while the job must not end: `leave` is called only when
        the lock is free."""
        self._leave: Callable[[Preempted], int] | None = None
        self._leaves = threading.Lock()
        super().__init__(STOP_SIGNALS)

    @property
    def leave(self) -> Callable[[Preempted], int] | None:
        """Function that ends the job in the phase ``setup``, whatever the main thread waits for,
        and returns the exit code. If it is None, the job ends after its first step. If a stop was
        requested before `leave` was set, setting it ends the job."""
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
            return  # a launcher ends the rest of a job; all is saved, reports may be in flight
        count = self.count()
        if count == 0:
            return
        if count > 1 or (number == signal.SIGINT and self.phase != "training"):
            self.end_at_once(number)
        elif number == signal.SIGINT and self.speaks:
            with contextlib.suppress(OSError, ValueError):
                text = (
                    "megapipe: saving after this step, then stopping; Ctrl-C again, more than "
                    f"{REPEAT_S:g} s after this one, stops at once"
                )
                print(f"{fresh_line(sys.stderr)}{text}", file=sys.stderr, flush=True)

    def _ask(self, number: signal.Signals) -> None:
        """Request a stop. If there is nothing to save yet, the first request ends the job."""
        self._note(number)
        unsaved = self.phase == "setup" and number != signal.SIGINT and self.leave is not None
        if unsaved and self._leaves.acquire(blocking=False):
            # in a new thread: the listening thread has to handle a second signal
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
    """Whether the user wants this process to ignore signal `number`. Only an ignored SIGHUP shows
    that (``nohup``): shells ignore SIGINT for background programs, and job scripts ignore signals
    that are meant for the ranks."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
