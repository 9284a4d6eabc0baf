"""The parts of a corpus tokenized by several processes; those that are there already are left.

Each process gets one part after another through a socket of its own. One whose parent is gone finds
it closed, and ends. What comes out does not depend on their number or pace. The processes are no
copies of this one and do not import its main module, which may be a script of the user's.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megapipe.data.corpus import CorpusShard
from megapipe.data.prepare.encode import Summary, encode, finished, prefix_of
from megapipe.data.tokenizer import Encoder
from megapipe.errors import DataError

Step = Callable[[CorpusShard, Summary, bool], None]
"""Is told of each part that is there, in any order, and whether it was there before."""
PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; "  # else it would begin with the current folder
    "from megapipe.data.worker import main; main()"
)
Job = tuple[int, CorpusShard]
"""A part and its number."""


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_all(
    parts: Iterable[CorpusShard], tokenizer: Encoder, folder: Path, workers: int | None, step: Step
) -> int:
    """Tokenize all parts into `folder`; their number. A corpus of one part is tokenized here.

    Args:
        workers: processes; None: one for each core.

    Raises:
        DataError: the corpus cannot be read, or a process has died.
        OSError: the folder cannot be written.
    """
    numbered = enumerate(parts)
    first = list(islice(numbered, 2))
    count = 0

    def missing() -> Iterator[Job]:
        nonlocal count
        for number, part in chain(first, numbered):
            count += 1
            summary = finished(prefix_of(folder, number), part)
            if summary is None:
                yield number, part
            else:
                step(part, summary, True)

    if len(first) < 2:
        for number, part in missing():
            step(part, encode(part, tokenizer, prefix_of(folder, number)), False)
    else:
        with _Pool(workers or cores(), tokenizer, folder) as pool:
            pool.run(missing(), step)
    return count


class _Pool:
    """Processes that tokenize, started when there is something for them to do."""

    def __init__(self, size: int, tokenizer: Encoder, folder: Path) -> None:
        self.size = size
        self._arguments = tokenizer, folder
        self._processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def run(self, jobs: Iterator[Job], step: Step) -> None:
        """Have all jobs done. Raises what one of them raises."""
        busy: dict[Connection, Job] = {}
        for job in jobs:
            while len(busy) == self.size:
                self._collect(busy, step)
            if not self._processes:
                self._start()
            idle = next(one for one in self._processes if one not in busy)
            with contextlib.suppress(ConnectionError):  # it has died: noticed when it is waited for
                idle.send(job)
            busy[idle] = job
        while busy:
            self._collect(busy, step)

    def _collect(self, busy: dict[Connection, Job], step: Step) -> None:
        """Wait for one process or more to be done with their jobs."""
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            number, part = busy.pop(ready)
            try:
                outcome = ready.recv()
            except (EOFError, ConnectionError):
                process = self._processes[ready]
                process.wait()
                hint = ""
                if process.returncode == -signal.SIGKILL:
                    hint = ": it was killed, as when memory is short; fewer data.workers need less"
                raise DataError(
                    f"a process that tokenizes has died at part {number} with exit code "
                    f"{process.returncode}{hint}"
                ) from None
            if isinstance(outcome, BaseException):
                raise outcome
            step(part, outcome, False)

    def _start(self) -> None:
        """Start all processes, and then tell each what they have in common: it listens when it has
        loaded its modules."""
        for _ in range(self.size):
            here, there = socket.socketpair()
            with there:
                who = str(os.getpid()), str(there.fileno())
                process = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, *who, *sys.path],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt is for this process, which ends them
                )
            self._processes[Connection(here.detach())] = process
        for connection in self._processes:
            with contextlib.suppress(ConnectionError):  # it has died
                connection.send(self._arguments)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for connection, process in self._processes.items():
            if error is not None:
                process.terminate()
            connection.close()
        for process in self._processes.values():
            process.wait()
