"""Ends a job after an error: one printed error, one exit code, and no process left waiting.

The first process to fail claims the failure in the rendezvous store and prints the error. The
others leave with the same exit code. A thread of every process waits for the claim, because the
main thread may wait for the failed peer in a collective that never returns. A process that is
killed from outside cannot claim. Then the first peer to notice claims the failure and prints an
error. If the store is lost too, nobody can claim. Then the first process of each node prints an
error, and also rank 1 if rank 0 hosted the store.

The process that hosts the store leaves last.

A store whose host is suspended or cannot be reached does not answer, and torch's client then waits
for ever, whatever its time-out. So every request to the store has a deadline at which the process
ends (:mod:`megapipe.launch.deadline`), and the thread that waits for failures notices within
``parallel.timeout_s`` that the store does not answer.
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
from megapipe.launch.error_owner import is_error_owner, may_print_alone
from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.rendezvous import STARTED, RendezvousError, open_store
from megapipe.util.paths import temporary_folder_problem

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 3.0
"""Seconds after a peer's failure that a process may take to end by itself."""
LINGER_S = 4.0
"""Seconds that the host of the store waits for other processes to leave; more than GRACE_S."""
SIGN_S = 1.0
"""Seconds between two requests that check whether the store is alive."""
ANSWER_S = 2.0
"""Seconds that the store may take to answer at the end of a job."""
HANG_ANSWER_S = 1.0
"""Seconds that the store may take to answer when the job hangs. It is short, as the ranks have
waited for ``parallel.timeout_s`` already."""
HANG_LINGER_S = 2.0
"""Seconds that the host of the store waits for the others when the job hangs; short, because all
processes learn of the hang at once."""
INTERRUPT_S = 1.0
"""Seconds that an interrupted process may take to inform the other processes; if it hosts the
store, it also waits that long for them to leave."""
EARLY_S = 5.0
"""Seconds that an interrupted process may take to inform the other processes if it still has to
open the store, and perhaps to load torch."""
PATIENCE_S = 30.0
"""Seconds that a process with an error waits for the others before they have met: where many
processes load torch from one disk, some begin much later."""
STOP_LINGER_S = 10.0
"""Seconds that the host of the store waits for the others after a request to stop; less than a
scheduler gives before it kills (SLURM: 30)."""
NAMED_S = 2.5
"""Seconds that a monitor may take to name the rank with which contact is lost; less than
:data:`GRACE_S`."""
FAILED = "failed"


class Shutdown:
    """Ends this process in a job whose processes meet in `store`.

    From the start, a thread watches for failures of other processes; the store has to answer its
    requests within `timeout_s`. If another process fails and this one does not end by itself, the
    thread calls the attribute `cleanup` and ends the process. With `trace` errors are printed with
    their traceback.
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
        """Whether this process leaves last, because the store is on its node."""
        self.answer_s: float | None = None
        """Seconds that the store may take to say which process prints the error; None: ANSWER_S."""
        self.cleanup: Callable[[], None] = lambda: None
        self.lost_contact: Callable[[], bool] = lambda: False
        """Function that asks a monitor, if one exists, to name the rank with which contact is lost.
        Returns whether a monitor will name it; the monitor then calls :meth:`hangs`."""
        self._store = store
        self._leaving = threading.Event()
        self._ender = threading.RLock()
        """Lock of the thread that ends this process; the thread never releases it."""
        self._printed = False
        self._known: int | None = None
        if info.world > 1:
            watcher = threading.Thread(target=self._watch, daemon=True)
            watcher.start()
            # a thread that returns from C++ while Python exits aborts the process
            atexit.register(watcher.join, 2 * SIGN_S)

    def _watch(self) -> None:
        lost = LaunchError(f"rank {self.info.rank} lost {self._store_name()}")
        store = self._await_failure()
        if is_set_within(self._leaving, GRACE_S):
            return
        self._ender.acquire()
        try:
            if store is None:
                self.report(lost)
            else:
                self._store = store  # on the old connection a request may be waiting
                self.leave(self._code)
            self.cleanup()
        finally:
            os._exit(self._code)

    @property
    def _code(self) -> int:
        """Exit code of this process after another process has failed."""
        return LaunchError.exit_code if self._known is None else self._known

    def _await_failure(self) -> Store | None:
        """Wait until another process has claimed a failure. Return a connection to the store, or
        None if the store is lost or this process leaves."""
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
        """End this process because the store does not answer. Do nothing if another thread is
        already ending the process: that thread has its own deadline."""
        if not self._ender.acquire(blocking=False):
            return
        seconds = f"{self.timeout_s:g} s (by parallel.timeout_s)"
        error = LaunchError(
            f"rank {self.info.rank} lost {self._store_name()}: no answer for {seconds}"
        )
        self._leaving.set()
        self._print_alone(error)
        with call_unless_done(GRACE_S, lambda: os._exit(error.exit_code)):
            self.cleanup()
        os._exit(error.exit_code)

    def hangs(self, verdict: str) -> None:
        """End this process because a monitor has found that the job hangs (:mod:`megapipe.watch`);
        `verdict` is the error's text. A separate thread calls this. Do nothing if another thread is
        already ending the process."""
        if not self._ender.acquire(blocking=False):
            return
        error = LaunchError(verdict)
        self.linger_s = HANG_LINGER_S
        self.answer_s = HANG_ANSWER_S
        code = self._end_beside(error)
        with call_unless_done(GRACE_S, lambda: os._exit(code)):
            self.cleanup()
        os._exit(code)

    def _store_name(self) -> str:
        whose = "" if self.info.hosted else " (rank 0's)"
        return f"the rendezvous store at {self.info.address}:{self.info.port}{whose}"

    def _print_alone(self, error: MegapipeError) -> None:
        """Print the error if this process is an error owner; used if the store does not answer."""
        if not self._printed and is_error_owner(self.info):
            print_error(error, trace=self.trace)
        self._printed = True

    def _deadline(self, error: MegapipeError) -> contextlib.AbstractContextManager[None]:
        """Return a context for asking the store which process prints `error`. If the store does not
        answer, the process prints `error` and ends."""

        def end() -> None:
            self._print_alone(type(error)(f"{error}; {self._store_name()} does not answer"))
            os._exit(error.exit_code)

        return call_unless_done(self.answer_s or ANSWER_S, end)

    def report(self, error: MegapipeError, *, printed: bool = False) -> int:
        """End this process's part in the job on an error, and print the error once per job.
        `printed`: whether the error is printed already.

        Return the exit code.
        """
        self._ender.acquire()
        self._leaving.set()
        self._printed |= printed
        with self._deadline(error):
            first = self._claim(error.exit_code)
        if first and not self._printed:
            print_error(error, trace=self.trace)
        self.leave(error.exit_code)
        return error.exit_code

    def stop(self, error: MegapipeError) -> int:
        """End this process's part in the job on a request to stop. A separate thread calls this,
        while the main thread may wait for anything. Return the exit code, with which the caller
        must end the process at once."""
        self._ender.acquire()
        self.linger_s = STOP_LINGER_S  # other processes may not have opened the store yet
        code = self._end_beside(error)
        self.cleanup()
        return code

    def interrupt(self, number: signal.Signals) -> None:
        """Inform the other processes that a signal ends this process, if the store answers in time.
        A separate thread calls this, whatever other threads do."""
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
        """End this process's part in the job on `error`; the main thread may be waiting for the
        store. If a peer has failed already, leave with its exit code. Return the exit code."""
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
        """End this process's part in the job on an exception that megapipe has not raised: an
        interrupt, a lost peer or store, or a bug.

        Only the first rank to fail prints the traceback of a bug. Return the exit code.
        """
        from torch.distributed import DistNetworkError

        if isinstance(error, KeyboardInterrupt):
            return Shutdown.report(self, interrupted(self.info), printed=self.info.world == 1)
        if self.info.world > 1 and is_communication(error):
            self._await_name()
            self._ender.acquire()
            reason = re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0]
            of_store = isinstance(error, DistNetworkError)
            whom = self._store_name() if of_store else "contact with a peer"
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
        """Wait until a monitor names the lost rank, which also ends this process. Stop waiting as
        soon as a peer has claimed a failure."""
        until = time.monotonic() + NAMED_S * self.lost_contact()
        while self._known is None and time.monotonic() < until:
            time.sleep(0.05)

    def leave(self, code: int = 0) -> None:
        """Tell the store that this process leaves. If this process hosts the store, wait for the
        others.

        The process ends with `code` if the store does not answer.
        """
        from torch.distributed import DistError

        self._ender.acquire()
        self._leaving.set()
        seconds = ANSWER_S + (self.linger_s + GRACE_S) * self.lingers
        with contextlib.suppress(DistError), call_unless_done(seconds, lambda: os._exit(code)):
            self._count_out()
            if not self.lingers:
                return
            wait_s = self.linger_s
            if self.info.hosted:  # a launcher ends the rest of its node, who then say nothing
                self._store.wait(["one left on each node"], datetime.timedelta(seconds=wait_s))
                wait_s = GRACE_S
            self._store.wait(["all left"], datetime.timedelta(seconds=wait_s))

    def _count_out(self) -> None:
        """Count this process among those that have left, and its node if it is the first there."""
        store, info = self._store, self.info
        if store.add(f"left/{info.rank - info.local_rank}", 1) == 1 and (
            store.add("ranks of nodes left", info.local_world) == info.world
        ):
            store.set("one left on each node", "")
        if store.add("left", 1) == info.world:
            store.set("all left", "")

    def _claim(self, exit_code: int) -> bool:
        """Claim the failure in the store. Return whether this process is the first to claim, and so
        prints the error."""
        from torch.distributed import DistError

        try:
            return claim(self._store, exit_code) is None
        except DistError:
            return self._known is None and may_print_alone(self.info)

    def _failure_of_peer(self, seconds: float) -> int | None:
        """Return the exit code of another rank's failure if one is claimed within `seconds`."""
        from torch.distributed import DistError, DistStoreError

        try:
            if seconds:
                with contextlib.suppress(DistStoreError):  # a late answer counts, below
                    self._store.wait([FAILED], datetime.timedelta(seconds=seconds))
            if self._store.check([FAILED]):
                return int(self._store.get(FAILED))
        except DistError:
            pass
        return self._known


def interrupted(
    info: LaunchInfo, by: str = "KeyboardInterrupt", exit_code: int = Interrupted.exit_code
) -> Interrupted:
    """Return the error of a rank that a signal or exception named `by` ends."""
    error = Interrupted(f"rank {info.rank} was interrupted ({by})")
    error.exit_code = exit_code
    return error


def interrupt_early(info: LaunchInfo, number: signal.Signals) -> None:
    """Inform the other processes, if the store exists, that a signal ends this process before it
    has opened the store. Nothing is done if the launcher ends the others, or if this process would
    host the store."""
    if info.world == 1 or info.port == 0 or info.hosts or info.ended_by_launcher:
        return
    late = call_unless_done(EARLY_S, lambda: os._exit(128 + number))
    with contextlib.suppress(RendezvousError), late:
        Shutdown(info, open_store(info, INTERRUPT_S, lambda line: None)).interrupt(number)


def claim(store: Store, exit_code: int) -> int | None:
    """Claim a failure for this process. Return None if the claim is the first, so that this process
    prints the error; else return the exit code of the first claim."""
    if store.add("failures", 1) > 1:
        return int(store.get(FAILED))
    store.set(FAILED, str(exit_code))
    return None


def end_early(error: MegapipeError, info: LaunchInfo, *, trace: bool = False) -> int:
    """End this process on an error from before the processes have met. Return the exit code.

    As a rule all processes have the same error, so rank 0 prints the error at once. Another process
    prints its own error only when it knows that rank 0 has none. The process that hosts the store,
    or the ranks on the node that hosts it, wait for the others, so that processes that begin later
    learn of the error. If the processes cannot meet, the first process of each node prints the
    error. `trace`: print the traceback too.
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
        return error.exit_code  # rank 0 also gets the signal, or prints an error
    if not isinstance(error, RendezvousError):
        try:
            store = open_store(info, PATIENCE_S, lambda line: None)
            if info.rank > 0:
                with call_unless_done(PATIENCE_S + ANSWER_S, lambda: os._exit(error.exit_code)):
                    _await_first_rank(store)
            early = Shutdown(info, store, linger_s=PATIENCE_S, trace=trace)
            # a launcher of several nodes ends with its ranks, and the first one has the store
            first_node = info.hosted and info.rank < info.local_world
            early.lingers |= first_node and not info.ended_by_launcher
            return early.report(error, printed=info.rank == 0)
        except RendezvousError:
            pass
    if info.rank > 0 and may_print_alone(info):
        print_error(error, trace=trace)
    return error.exit_code


def _await_first_rank(store: Store) -> None:
    """Wait until rank 0 has claimed a failure or started without an error, at most PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not (store.check([STARTED]) or store.check([FAILED])) and time.monotonic() < deadline:
        time.sleep(0.1)


def end_now(code: int) -> NoReturn:
    """End this process without waiting for other threads, for example torch's, which could delay
    the end or change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the reader
            stream.flush()
    os._exit(code)


def is_communication(error: BaseException) -> bool:
    """Whether `error` comes from a message or collective whose peer may have failed."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )
