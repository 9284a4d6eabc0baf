"""Processes that own a folder, and how others see whether they are still there.

A process owns a folder ``.NAME.1`` by having created it: mkdir succeeds for one process only, on
network file systems too. As long as it lives it rewrites a file in it every few seconds, with its
identity and a rising count. It is gone if it is of the reader's machine and has ended, or if the
count stands still for longer than network file systems delay what others wrote. Clocks of machines
are not compared. Who finds the owner of ``.NAME.1`` gone creates ``.NAME.2``.
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

from megapipe.util.beneath import write_no_symlinks
from megapipe.util.lived import LivedTime
from megapipe.util.processes import machine, start_of

BEAT_S = 5.0
"""Seconds between two writes of the count."""
STALE_S = 90.0
"""Seconds without a new count after which a process is taken for gone. NFS shows the present
content of a file that is opened, but may hide a new file for 60 s."""
POLL_S = 0.2, 2.0
"""Seconds between looks, at first and after a while."""


def attempts(folder: Path) -> Iterator[tuple[int, Path]]:
    """The folders beside `folder` that processes own for it, with their numbers."""
    prefix = f".{folder.name}."
    for name in os.listdir(folder.parent):
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdigit():
            yield int(number), folder.with_name(name)


@dataclass(frozen=True)
class Owner:
    """A process, and how often it has said that it is alive."""

    host: str
    machine: str
    """A name that tells machines, and containers that count processes by themselves, apart."""
    process: int
    began: float
    """Start of the process, in the machine's own measure."""
    since: float = 0.0
    """Unix time at which it became the owner, to be shown and not compared."""
    count: int = 0

    @staticmethod
    def this_process() -> Owner:
        pid = os.getpid()
        return Owner(socket.gethostname(), machine(), pid, start_of(pid) or 0.0, time.time())

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def is_here(self) -> bool:
        """Whether it is of this machine, where its end is seen at once."""
        return self.machine == machine()

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended: it is of this machine and not there."""
        if not self.is_here:
            return False
        began = start_of(self.process)  # 0: the system does not tell of processes of other users
        return began is None or began not in (0.0, self.began)


@contextlib.contextmanager
def beating(path: Path, *, proof: Path | None = None) -> Iterator[None]:
    """Write to `path` at once and then every few seconds that this process is alive; remove it
    afterwards. Nothing is done without the file `proof` that the folder is still its own."""
    me, done = asdict(Owner.this_process()), threading.Event()

    def beat(count: int) -> None:
        if proof is not None and not proof.exists():
            return
        with contextlib.suppress(OSError):  # a full disk, or what others took away
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
    """The owner that writes to `path`; None if the file is missing or unreadable."""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class OwnerWatch:
    """Looks of a waiting process at owners of folders, which may have been suspended with it."""

    def __init__(self) -> None:
        self._clock = LivedTime(2 * POLL_S[1])
        self._seen: tuple[Path, Owner | None] | None = None
        self._since = 0.0
        self.owner: Owner | None = None
        """The owner as of the last look; None if it has not said who it is."""

    def look(self, path: Path) -> Literal["gone", "alive", "unknown"]:
        """Look at the owner that writes to `path`: it is alive if its count has risen
        between two looks."""
        self.owner, now = read(path), self._clock.look()
        before, self._seen = self._seen, (path, self.owner)
        if before != self._seen:
            self._since = now
        if (self.owner is not None and self.owner.ended) or now - self._since > STALE_S:
            return "gone"
        known = before is not None and before[0] == path and before[1] is not None
        return "alive" if known and before != self._seen else "unknown"

    def name(self) -> str:
        """The owner in words."""
        return "a process that did not say which" if self.owner is None else str(self.owner)

    def pause(self) -> None:
        """Sleep until the next look."""
        time.sleep(min(max(POLL_S[0], self._clock.look() / 20), POLL_S[1]))


def print_notice(line: str) -> None:
    """Tell a line on stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(f"megapipe: {line}", file=sys.stderr, flush=True)
