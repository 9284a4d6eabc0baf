"""A pool of processes that call one function with many jobs.

The processes are not forked and do not import the main module, which may be a user script. Each
gets one job after another through a socket. If the parent is gone, the socket is closed and the
process ends, even within a job.
"""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from megapipe.errors import MegapipeError

Job = TypeVar("Job")
Result = TypeVar("Result")

PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "  # otherwise it would begin with the current folder
    "from megapipe.util.process_pool import main; main()"
)
LOOK_S = 0.5
"""Seconds between two checks that the parent process is alive."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerDied(Exception):
    """A process of the pool ended during a job."""

    def __init__(self, job: Any, code: int) -> None:
        super().__init__(f"a process died; exit code {code}")
        self.job, self.code = job, code


class ProcessPool(Generic[Job, Result]):
    """Processes that call a function; a context manager, whose end ends them."""

    def __init__(self, size: int, function: Callable[..., Result], *shared: Any) -> None:
        """Prepare `size` processes, which :meth:`run` starts with the first job.

        Args:
            function: function of a module, called with `shared` and a job. Arguments and results
                are pickled.
            shared: first arguments of all calls.
        """
        self.size = size
        self._call = function, shared
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Result]]:
        """Yield each job with its result, in the order in which they are completed. A job is taken
        from `jobs` once a process is idle.

        Raises:
            MegapipeError, OSError: these errors of a call.
            RuntimeError: any other error of a call, with its traceback.
            WorkerDied: a process ended during a job.
        """
        busy: dict[Connection, Job] = {}
        for job in jobs:
            while len(busy) == self.size:
                yield from self._completed(busy)
            if not self._processes:
                self._start()
            idle = next(one for one in self._processes if one not in busy)
            with contextlib.suppress(ConnectionError):  # it has died: noticed in _completed
                idle.send(job)
            busy[idle] = job
        while busy:
            yield from self._completed(busy)

    def _completed(self, busy: dict[Connection, Job]) -> Iterator[tuple[Job, Result]]:
        """Wait until at least one process has completed its job."""
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            job = busy.pop(ready)
            try:
                outcome = ready.recv()
            except (EOFError, ConnectionError):
                raise WorkerDied(job, self._processes[ready].wait()) from None
            if isinstance(outcome, BaseException):
                raise outcome
            yield job, outcome

    def _start(self) -> None:
        """Start all processes, then send each the function; a process reads it once its modules are
        loaded."""
        for _ in range(self.size):
            parent_end, child_end = socket.socketpair()
            with child_end:
                who = str(os.getpid()), str(child_end.fileno())
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *who, *sys.path],
                    pass_fds=[child_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt is for this process only
                )
            self._processes[Connection(parent_end.detach())] = process
        for connection in self._processes:
            with contextlib.suppress(ConnectionError):  # it has died
                connection.send(self._call)

    def __enter__(self) -> ProcessPool[Job, Result]:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for connection, process in self._processes.items():
            if error is not None:
                process.terminate()
            connection.close()
        for process in self._processes.values():
            process.wait()


def main() -> None:
    """Work for a parent process. The first command-line argument is the parent's process id, the
    second the file descriptor of the socket."""
    parent, connection = map(int, sys.argv[1:3])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _work(Connection(connection))


def _work(connection: Connection) -> None:
    """Do the jobs that arrive on the connection, until it is closed."""
    try:
        function, shared = connection.recv()
        while True:
            job = connection.recv()
            try:
                outcome = function(*shared, job)
            except (MegapipeError, OSError) as error:
                outcome = error
            except BaseException:
                outcome = RuntimeError(f"{job}: {traceback.format_exc()}")
            _send(connection, job, outcome)
    except (EOFError, ConnectionError):
        return


def _send(connection: Connection, job: Any, outcome: Any) -> None:
    """Send the outcome of a job; if it cannot be pickled and restored, an error that says so."""
    try:
        if isinstance(outcome, BaseException):
            copy.copy(outcome)  # as unpickling does: some errors cannot be made from their args
        connection.send(outcome)
    except ConnectionError:
        raise
    except Exception:  # an object may raise any error while it is pickled or made
        connection.send(RuntimeError(f"{job}: {outcome!r}: {traceback.format_exc()}"))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)
