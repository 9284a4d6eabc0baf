"""Ownership of a folder by one process, whose heartbeats show other processes that it still runs.

The process that creates the folder ``.NAME.1`` owns NAME: mkdir succeeds for one process only, on
network file systems too. While the owner lives, it rewrites a file in that folder every few
seconds, with its identity and a rising count. An owner counts as gone if it ran on the reader's
machine and has ended, or if its count has not changed for longer than network file systems delay
writes. Clocks of machines are not compared. A process that finds the owner gone creates
``.NAME.2`` and so becomes the next owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megapipe.util.lived import LivedTime
from megapipe.util.no_symlinks import write_no_symlinks
from megapipe.util.processes import machine, start_of

BEAT_S = 5.0
"""Seconds between two heartbeats of an owner."""
STALE_S = 90.0
"""Seconds without a heartbeat after which an owner counts as gone. NFS shows the present content
of a file that is opened, but can hide a new file for 60 s."""
POLL_S = 0.2, 2.0
"""Shortest and longest time between two reads of an owner's heartbeat file, seconds."""


def attempts(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield number and path of each folder ``.NAME.1``, ``.NAME.2``, ... that a process has created
    to own `folder`, where NAME is the name of `folder`."""
    prefix = f".{folder.name}."
    for name in os.listdir(folder.parent):
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdigit():
            yield int(number), folder.with_name(name)


@dataclass(frozen=True)
class Owner:
    """A process that owns a folder, as described in its heartbeat file."""

    host: str
    machine: str
    """Name of the machine, or of the container if the container has its own process ids."""
    process: int
    began: float
    """Start time of the process, as :func:`~megapipe.util.processes.start_of` returns it."""
    since: float = 0.0
    """Unix time at which the process became the owner; for messages, not for comparisons."""
    count: int = 0
    """Number of earlier heartbeats of the process."""

    @staticmethod
    def this_process() -> Owner:
        pid = os.getpid()
        return Owner(socket.gethostname(), machine(), pid, start_of(pid) or 0.0, time.time())

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether the process is on this machine, where its end can be observed directly."""
        return self.machine == machine()

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended: it ran on this machine and runs no longer."""
        if not self.is_here:
            return False
        began = start_of(self.process)  # 0: the system hides processes of other users
        return began is None or began not in (0.0, self.began)


@contextlib.contextmanager
def beating(path: Path, *, proof: Path | None = None) -> Iterator[None]:
    """Write heartbeats of this process to the file `path` while the context is open, the first one
    at once. Remove the file when the context closes. If the file `proof` is missing, another
    process has become the owner, and `path` is left alone."""
    me, done = asdict(Owner.this_process()), threading.Event()

    def beat(count: int) -> None:
        if proof is not None and not proof.exists():
            return
        with contextlib.suppress(OSError):  # the disk is full, or the folder was removed
            fresh = path.with_name(f".{path.name}")
            write_no_symlinks(path.parent, fresh.name, json.dumps({**me, "count": count}))
            fresh.rename(path)

    def go_on() -> None:
        count = 1
        while not done.wait(BEAT_S):
            beat(count)
            count += 1

    beat(0)
    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if proof is None or proof.exists():
            path.unlink(missing_ok=True)


def read(path: Path) -> Owner | None:
    """Return the owner that the heartbeat file `path` names; None if it is missing or damaged."""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class OwnerWatch:
    """Checks for a waiting process whether the owner of a folder is alive. Time in which the
    waiting process is suspended does not count: the owner may be suspended with it."""

    def __init__(self) -> None:
        self._clock = LivedTime(2 * POLL_S[1])
        self._seen: tuple[Path, Owner | None] | None = None
        self._since = 0.0
        self.owner: Owner | None = None
        """The owner that :meth:`look` has read; None if the heartbeat file was not readable."""

    def look(self, path: Path) -> Literal["gone", "alive", "unknown"]:
        """Read the heartbeat file `path` and compare it with the previous call. The owner is alive
        if there is a new heartbeat, and gone if its process has ended or its last heartbeat is too
        old. The first call never returns "alive"."""
        self.owner, now = read(path), self._clock.look()
        before, self._seen = self._seen, (path, self.owner)
        if before != self._seen:
            self._since = now
        if (self.owner is not None and self.owner.ended) or now - self._since > STALE_S:
            return "gone"
        known = before is not None and before[0] == path and before[1] is not None
        return "alive" if known and before != self._seen else "unknown"

    def name(self) -> str:
        """Return a description of the owner, such as ``process 123 on node7``."""
        return "an unknown process" if self.owner is None else str(self.owner)

    def pause(self) -> None:
        """Sleep before the next :meth:`look`, for longer the longer this process has waited."""
        time.sleep(min(max(POLL_S[0], self._clock.look() / 20), POLL_S[1]))


def print_notice(line: str) -> None:
    """Print a line on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"megapipe: {line}", file=sys.stderr, flush=True)
