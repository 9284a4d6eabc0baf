"""How a job ends when something is wrong: one line, one exit code, and no process left waiting.

The first process to fail claims the failure in the rendezvous store and speaks for the job; the
others leave with its exit code. A thread of every process waits for that claim, because a peer
may wait for the failed one inside a collective that notices nothing. A process that is killed from
outside claims nothing: then the first peer to notice claims the failure and speaks. If the store
died too, nobody can claim it; the first process of each node speaks, and rank 1 where rank 0 had
the store.

The process that hosts the store leaves last.

A store whose host is stopped or cannot be reached answers nobody, and torch's client then waits for
ever, whatever time-out it is given. So nothing here asks the store without a deadline by which the
process ends by itself (:mod:`megapipe.launch.deadline`), and the thread that waits for failures
finds out within ``parallel.timeout_s``.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from megapipe.command_line import print_error, show_trace
from megapipe.errors import Interrupted, LaunchError, MegapipeError, Preempted
from megapipe.launch.deadline import call_unless_done, is_set_within
from megapipe.launch.place import LaunchInfo
from megapipe.launch.rendezvous import VALUES, RendezvousError, open_store
from megapipe.launch.speaking import is_error_owner, may_print_alone
from megapipe.util.paths import temporary_folder_problem

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 3.0
"""How long after a peer's failure a process may take to end by itself."""
LINGER_S = 4.0
"""How long the host of the store waits for the others to leave: longer than their grace."""
SIGN_S = 1.0
"""Time between two signs of life that a process asks of the store."""
ANSWER_S = 2.0
"""How long the store may take to answer at the end of a job."""
HANG_ANSWER_S = 1.0
"""The same where the job hangs: others have waited for long, and a link may be down."""
HANG_LINGER_S = 2.0
"""Of the host of the store where the job hangs: whoever can hear that, hears it at once."""
INTERRUPT_S = 1.0
"""How long a process that is interrupted may take to tell the others, and as the host of the store
waits for them."""
EARLY_S = 5.0
"""The same before it has opened the store: torch may have to be loaded."""
PATIENCE_S = 10.0
"""How long processes wait for each other that have not met yet: torch takes its time to load."""
NAMED_S = 2.5
"""How long a monitor may take to name the rank with which this one has lost contact: less than
:data:`GRACE_S`."""
FAILED = "failed"


class Shutdown:
    """How this process leaves the job that meets in `store`.

    A thread watches for failures of others from the start, and asks the store for a sign of life
    within `timeout_s`; if there is a failure and this process does not end by itself, the thread
    calls `cleanup` (settable) and ends the process. With `trace` it shows where an error arose.
    """

    def __init__(
        self,
        info: LaunchInfo,
        store: Store,
        *,
        timeout_s: float = 600.0,
        linger_s: float = LINGER_S,
        trace: bool = False,
    ) -> None:
        self.info = info
        self.trace = trace
        self.timeout_s = timeout_s
        self.linger_s = linger_s
        self.lingers = info.hosts
        """Whether this process waits for the others before it leaves, as the store ends with it."""
        self.answer_s: float | None = None
        """How long the store may take to tell who speaks, if not as long as ever."""
        self.cleanup: Callable[[], None] = lambda: None
        self.lost_contact: Callable[[], bool] = lambda: False
        """Asks a monitor, if there is one, to name the rank with which contact is lost, by
        :meth:`hangs`."""
        self._store = store
        self._leaving = threading.Event()
        self._ender = threading.RLock()
        """Held, and never given back, by the thread that ends this process."""
        self._said = False
        self._known: int | None = None
        if info.world > 1:
            watcher = threading.Thread(target=self._watch, daemon=True)
            watcher.start()
            # a thread that comes out of C++ while Python ends aborts the process
            atexit.register(watcher.join, 2 * SIGN_S)

    def _watch(self) -> None:
        lost = LaunchError(f"rank {self.info.rank} lost {self._place()}")
        store = self._await_failure()
        if is_set_within(self._leaving, GRACE_S):
            return
        self._ender.acquire()
        try:
            if store is None:
                self.report(lost)
            else:
                self._store = store  # the other connection may be waiting for an answer
                self.leave(self._code)
            self.cleanup()
        finally:
            os._exit(self._code)

    @property
    def _code(self) -> int:
        """The exit code for a failure of another process."""
        return LaunchError.exit_code if self._known is None else self._known

    def _await_failure(self) -> Store | None:
        """Wait until another process says that it has failed; returns a connection to the store,
        or None if the store is gone or this process leaves."""
        from torch.distributed import DistNetworkError, DistStoreError

        try:
            with call_unless_done(self.timeout_s, self._mute):
                store: Store = self._store.clone()  # type: ignore[attr-defined]
            while not self._leaving.is_set():
                late = call_unless_done(SIGN_S + self.timeout_s, self._mute)
                with late, contextlib.suppress(DistStoreError):
                    store.wait([FAILED], datetime.timedelta(seconds=SIGN_S))
                    self._known = int(store.get(FAILED))
                    return store
        except DistNetworkError:
            pass
        return None

    def _mute(self) -> None:
        """End without the store, which does not answer; a thread that ends this process already
        has a deadline of its own."""
        if not self._ender.acquire(blocking=False):
            return
        seconds = f"{self.timeout_s:g} s (by parallel.timeout_s)"
        error = LaunchError(f"rank {self.info.rank} lost {self._place()}: no answer for {seconds}")
        self._leaving.set()
        self._say_alone(error)
        with call_unless_done(GRACE_S, lambda: os._exit(error.exit_code)):
            self.cleanup()
        os._exit(error.exit_code)

    def hangs(self, verdict: str) -> None:
        """End because the job hangs, as a monitor has found (:mod:`megapipe.watch`), in a thread of
        its own; another that ends this process already goes on with that."""
        if not self._ender.acquire(blocking=False):
            return
        error = LaunchError(verdict)
        self.linger_s = HANG_LINGER_S
        self.answer_s = HANG_ANSWER_S
        code = self._end_beside(error)
        with call_unless_done(GRACE_S, lambda: os._exit(code)):
            self.cleanup()
        os._exit(code)

    def _place(self) -> str:
        whose = "" if self.info.hosted else " (rank 0's)"
        return f"the rendezvous store at {self.info.address}:{self.info.port}{whose}"

    def _say_alone(self, error: MegapipeError) -> None:
        """Say it if this process is one that speaks where the store cannot be asked."""
        if not self._said and is_error_owner(self.info):
            print_error(error, trace=self.trace)
        self._said = True

    def _deadline(self, error: MegapipeError) -> contextlib.AbstractContextManager[None]:
        """A block that asks the store who speaks of `error`: if there is no answer the process ends
        by it."""

        def end() -> None:
            self._say_alone(type(error)(f"{error}; {self._place()} does not answer"))
            os._exit(error.exit_code)

        return call_unless_done(self.answer_s or ANSWER_S, end)

    def report(self, error: MegapipeError, *, said: bool = False) -> int:
        """End on an error: print it, once per job, unless it is `said` already.

        Returns the exit code.
        """
        self._ender.acquire()
        self._leaving.set()
        self._said |= said
        with self._deadline(error):
            first = self._claim(error.exit_code)
        if first and not self._said:
            print_error(error, trace=self.trace)
        self.leave(error.exit_code)
        return error.exit_code

    def stop(self, error: MegapipeError) -> int:
        """End on a request to stop, in a thread of its own, while the main thread may wait for
        anything. Returns the exit code, by which the process is to end at once."""
        self._ender.acquire()
        self.linger_s = PATIENCE_S  # others may be on their way to the store
        code = self._end_beside(error)
        self.cleanup()
        return code

    def interrupt(self, number: signal.Signals) -> None:
        """Tell the others, if the store answers at once, that this process ends by a signal: in a
        thread of its own, whatever other threads do."""
        from torch.distributed import DistError

        error = interrupted(self.info, number.name, 128 + number)
        late = call_unless_done(INTERRUPT_S, lambda: os._exit(error.exit_code))
        with contextlib.suppress(DistError), late:
            if self.info.world > 1:
                store: Store = self._store.clone()  # type: ignore[attr-defined]
                if claim(store, error.exit_code) is None:
                    print_error(error)
                if self.info.hosts:
                    store.wait(["all left"], datetime.timedelta(seconds=INTERRUPT_S))

    def _end_beside(self, error: MegapipeError) -> int:
        """End beside a main thread that may be waiting for the store, unless a peer has failed by
        itself; returns the exit code."""
        from torch.distributed import DistError

        with self._deadline(error):
            if self.info.world > 1:
                with contextlib.suppress(DistError):  # the store is gone
                    self._store = self._store.clone()  # type: ignore[attr-defined]
            code = self._failure_of_peer(0.0)
        if code is None:
            return Shutdown.report(self, error)
        self.leave(code)
        return code

    def report_unexpected(self, error: BaseException) -> int:
        """End on an exception that is not ours: an interrupt, a peer's failure, a lost peer, or a
        bug.

        Only the first rank to fail shows the traceback of a bug. Returns the exit code.
        """
        from torch.distributed import DistNetworkError

        if isinstance(error, KeyboardInterrupt):
            return Shutdown.report(self, interrupted(self.info), said=self.info.world == 1)
        if self.info.world > 1 and is_communication(error):
            self._await_name()
            self._ender.acquire()
            reason = re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0]
            of_store = isinstance(error, DistNetworkError)
            whom = self._place() if of_store else "contact with a peer"
            notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
            lost = LaunchError(f"rank {self.info.rank} lost {whom}: {reason}{notes}")
            with self._deadline(lost):
                code = self._failure_of_peer(1.0)
            if code is None:
                return self.report(lost)
            self.leave(code)
            return code
        self._ender.acquire()
        self._leaving.set()
        with self._deadline(MegapipeError(f"a bug: {type(error).__name__}: {error}")):
            first = self._claim(1)
        if first:
            show_trace(error)
        self.leave(1)
        return 1

    def _await_name(self) -> None:
        """Wait for a monitor to name the rank with which contact is lost, which ends this process,
        as long as no peer says that it has failed by itself."""
        until = time.monotonic() + NAMED_S * self.lost_contact()
        while self._known is None and time.monotonic() < until:
            time.sleep(0.05)

    def leave(self, code: int = 0) -> None:
        """Tell the store that this process is done with it; one that lingers waits for all.

        The process ends with `code` if the store does not answer.
        """
        from torch.distributed import DistError

        self._ender.acquire()
        self._leaving.set()
        seconds = ANSWER_S + self.linger_s * self.lingers
        with contextlib.suppress(DistError), call_unless_done(seconds, lambda: os._exit(code)):
            if self._store.add("left", 1) == self.info.world:
                self._store.set("all left", "")
            if self.lingers:
                self._store.wait(["all left"], datetime.timedelta(seconds=self.linger_s))

    def _claim(self, exit_code: int) -> bool:
        """Claim the failure in the store; whether this process was first, and so is to speak."""
        from torch.distributed import DistError

        try:
            return claim(self._store, exit_code) is None
        except DistError:
            return self._known is None and may_print_alone(self.info)

    def _failure_of_peer(self, seconds: float) -> int | None:
        """The exit code that another rank failed with, if one says so within `seconds`."""
        from torch.distributed import DistError, DistStoreError

        try:
            if seconds:
                with contextlib.suppress(DistStoreError):  # an answer that is late counts, below
                    self._store.wait([FAILED], datetime.timedelta(seconds=seconds))
            if self._store.check([FAILED]):
                return int(self._store.get(FAILED))
        except DistError:
            pass
        return self._known


def interrupted(
    info: LaunchInfo, by: str = "KeyboardInterrupt", exit_code: int = Interrupted.exit_code
) -> Interrupted:
    """Make the error of a rank that ends by a signal, or by the exception of that name."""
    error = Interrupted(f"rank {info.rank} was interrupted ({by})")
    error.exit_code = exit_code
    return error


def interrupt_early(info: LaunchInfo, number: signal.Signals) -> None:
    """Tell the others that this process ends by a signal, before it has opened the store, if that
    is there. The launcher that ends the others needs not be told; nobody can be told by the process
    that is to host the store."""
    if info.world == 1 or info.port == 0 or info.hosts or info.ended_by_launcher:
        return
    late = call_unless_done(EARLY_S, lambda: os._exit(128 + number))
    with contextlib.suppress(RendezvousError), late:
        Shutdown(info, open_store(info, INTERRUPT_S, lambda line: None)).interrupt(number)


def claim(store: Store, exit_code: int) -> int | None:
    """Claim a failure for this process, which is to speak if it is the first; else the exit code of
    that."""
    if store.add("failures", 1) > 1:
        return int(store.get(FAILED))
    store.set(FAILED, str(exit_code))
    return None


def end_early(error: MegapipeError, info: LaunchInfo, *, trace: bool = False) -> int:
    """End on an error from before the processes have met. Returns the exit code.

    As a rule all processes have the same error, so rank 0 prints it at once, and another process
    prints its own only when it has heard that rank 0 is well. Ranks beside the store wait for the
    others, which may have begun later, so that they hear of it. Where they have no place to meet,
    or cannot load what they need for it, the first of each node prints it. `trace`: with where it
    arose.
    """
    if info.port == 0 or temporary_folder_problem() is not None:
        if info.local_rank == 0:
            print_error(error, trace=trace)
        return error.exit_code
    if info.rank == 0:
        print_error(error, trace=trace)
        if info.world == 1 or info.ended_by_launcher:
            return error.exit_code
    elif info.ended_by_launcher and isinstance(error, Preempted):
        return error.exit_code  # rank 0 is asked too, or has an error that it says
    if not isinstance(error, RendezvousError):
        try:
            store = open_store(info, PATIENCE_S, lambda line: None)
            if info.rank > 0:
                with call_unless_done(PATIENCE_S + ANSWER_S, lambda: os._exit(error.exit_code)):
                    _hear_from_first(store)
            early = Shutdown(info, store, linger_s=PATIENCE_S, trace=trace)
            # a launcher of several nodes ends with its ranks, and the first one has the store
            first_node = info.hosted and info.rank < info.local_world
            early.lingers |= first_node and not info.ended_by_launcher
            return early.report(error, said=info.rank == 0)
        except RendezvousError:
            pass
    if info.rank > 0 and may_print_alone(info):
        print_error(error, trace=trace)
    return error.exit_code


def _hear_from_first(store: Store) -> None:
    """Wait until rank 0 has gone on or has failed, for as long as it is worth it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (store.check([VALUES]) or store.check([FAILED])) and time.monotonic() < deadline:
        time.sleep(0.1)


def end_now(code: int) -> NoReturn:
    """End this process without waiting for threads, of torch and of others, that could hold up or
    change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the reader
            stream.flush()
    os._exit(code)


def is_communication(error: BaseException) -> bool:
    """Whether the error is that of a message or collective, whose peer may have failed."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
