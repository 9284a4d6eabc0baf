"""How a job ends when something is wrong: one line, one exit code, and no process left waiting.

The first process to fail claims the failure in the rendezvous store and speaks for the job; the
others leave with its exit code. A thread of every process waits for that claim, because a peer
may wait for the failed one inside a collective that notices nothing. A process that is killed from
outside claims nothing: then the first peer to notice claims the failure and speaks. If the store
died too, nobody can claim it; rank 1 and the first process of each node speak.

The process that hosts the store leaves last.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from megapipe.errors import LaunchError, MegapipeError
from megapipe.launch.place import LaunchInfo
from megapipe.launch.rendezvous import VALUES, RendezvousError, open_store

if TYPE_CHECKING:
    from torch.distributed import Store

GRACE_S = 3.0
"""How long after a peer's failure a process may take to end by itself."""
LINGER_S = 5.0
"""How long the host of the store waits for the others to leave: longer than their grace."""
PATIENCE_S = 10.0
"""How long processes wait for each other that have not met yet: torch takes its time to load."""
DYING_S = 1.0
"""How long a killed process may take to give back its port."""
FAILED = "failed"


class Shutdown:
    """How this process leaves the job that meets in `store`.

    A thread watches for failures of others from the start; if there is one and this process does
    not end by itself, the thread calls `cleanup` (settable) and ends the process.
    """

    def __init__(self, info: LaunchInfo, store: Store, *, linger_s: float = LINGER_S) -> None:
        self.info = info
        self.linger_s = linger_s
        self.cleanup: Callable[[], None] = lambda: None
        self._store = store
        self._leaving = threading.Event()
        self._known: int | None = None
        if info.world > 1:
            threading.Thread(target=self._watch, args=(store.clone(),), daemon=True).start()  # type: ignore[attr-defined]

    def _watch(self, store: Store) -> None:
        from torch.distributed import DistNetworkError, DistStoreError

        while self._known is None:
            try:
                store.wait([FAILED], datetime.timedelta(hours=1))
                self._known = int(store.get(FAILED))
            except DistNetworkError:
                break
            except DistStoreError:  # a quiet hour
                continue
        if self._leaving.wait(GRACE_S):
            return
        self._store = store  # the other connection may be waiting for an answer
        try:
            if self._known is None:
                self.report(LaunchError(f"rank {self.info.rank} lost the rendezvous store"))
            else:
                self.leave()
            self.cleanup()
        finally:
            os._exit(LaunchError.exit_code if self._known is None else self._known)

    def report(self, error: MegapipeError, *, said: bool = False) -> int:
        """End on an error: print it, once per job, unless it is `said` already.

        Returns the exit code.
        """
        self._leaving.set()
        if self._claim(error.exit_code) and not said:
            say(error)
        self.leave()
        return error.exit_code

    def report_unexpected(self, error: Exception) -> int:
        """End on an exception that is not ours: a peer's failure, a lost peer, or a bug.

        Only the first rank to fail shows the traceback of a bug. Returns the exit code.
        """
        if self.info.world > 1 and is_communication(error):
            code = self._failure_of_peer()
            if code is None:
                reason = re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0]
                lost = f"rank {self.info.rank} lost contact with a peer: {reason}"
                return self.report(LaunchError(lost))
            self.leave()
            return code
        self._leaving.set()
        if self._claim(1):
            traceback.print_exception(error)
        self.leave()
        return 1

    def leave(self) -> None:
        """Tell the store that this process is done with it; the host of the store waits for all."""
        from torch.distributed import DistError

        self._leaving.set()
        with contextlib.suppress(DistError):
            if self._store.add("left", 1) == self.info.world:
                self._store.set("all left", "")
            if self.info.hosts:
                self._store.wait(["all left"], datetime.timedelta(seconds=self.linger_s))

    def _claim(self, exit_code: int) -> bool:
        """Claim the failure in the store; whether this process was first, and so is to speak."""
        from torch.distributed import DistError

        try:
            first = self._store.add("failures", 1) == 1
            if first:
                self._store.set(FAILED, str(exit_code))
        except DistError:
            return self._known is None and speaks_alone(self.info)
        return first

    def _failure_of_peer(self) -> int | None:
        """The exit code that another rank failed with, if one has said so."""
        from torch.distributed import DistError

        try:
            self._store.wait([FAILED], datetime.timedelta(seconds=1))
            return int(self._store.get(FAILED))
        except DistError:
            return self._known


def end_early(error: MegapipeError, info: LaunchInfo) -> int:
    """End on an error from before the processes have met. Returns the exit code.

    As a rule all processes have the same error, so rank 0 prints it at once, and another process
    prints its own only when it has heard that rank 0 is well.
    """
    if info.rank == 0:
        say(error)
        if info.world == 1 or info.ended_by_launcher:
            return error.exit_code
    if not isinstance(error, RendezvousError):
        try:
            store = open_store(info, PATIENCE_S)
            if info.rank > 0:
                _hear_from_first(store)
            early = Shutdown(info, store, linger_s=PATIENCE_S)
            return early.report(error, said=info.rank == 0)
        except RendezvousError:
            pass
    if info.rank > 0 and speaks_alone(info):
        say(error)
    return error.exit_code


def _hear_from_first(store: Store) -> None:
    """Wait until rank 0 has gone on or has failed, for as long as it is worth it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (store.check([VALUES]) or store.check([FAILED])) and time.monotonic() < deadline:
        time.sleep(0.1)


def speaks_alone(info: LaunchInfo) -> bool:
    """Whether a process that cannot reach the store reports that.

    Rank 1 and the first process of each node do, unless the port stays taken on their host: then
    rank 0 reports it. A rank 0 that was killed gives the port back in a moment.
    """
    if info.rank > 1 and info.local_rank > 0:
        return False
    deadline = time.monotonic() + DYING_S
    while _is_taken(info):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_taken(info: LaunchInfo) -> bool:
    """Whether a program on this host listens where the store should be."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((info.address, info.port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def say(error: MegapipeError) -> None:
    """Print an error as one line."""
    text = " ".join(str(error).split())
    with contextlib.suppress(OSError, ValueError):
        print(f"megapipe: error: {text}", file=sys.stderr, flush=True)


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
