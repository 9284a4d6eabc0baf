"""A folder that several processes need, and one of them makes.

The process that makes ``corpus``, its maker, works in ``.corpus.1`` beside it. It owns that folder
by having created it: mkdir succeeds for one process only, on network file systems too. When the
folder is complete, a rename gives it its name. Until then the maker rewrites the file ``maker`` in
it every few seconds, with its identity and a rising count. Other processes wait and read that file.
A maker is gone if it is of the reader's machine and has ended, or if the count stands still for
longer than network file systems delay what others wrote. Clocks of machines are not compared. A
process that finds the maker gone makes the folder anew in ``.corpus.2``.

A wrong judgement does no harm: a maker that was only suspended goes on in its own folder, the first
to finish wins, and both make the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

BEAT_S = 5.0
"""Seconds between two writes of the maker's count."""
STALE_S = 90.0
"""Seconds without a new count after which a maker is taken for gone. NFS shows the present content
of a file that is opened, but may hide a new file for 60 s."""
POLL_S = 0.2, 2.0
"""Seconds between looks, at first and after a while."""
MAKER = "maker"


def make_once(
    folder: Path, fill: Callable[[Path], None], note: Callable[[str], None] | None = None
) -> None:
    """Return when `folder` exists, made here or by another process that was first.

    `fill` fills a folder of another name, which is then renamed. `note` is given a line if there is
    a maker to wait for, or to take over from; by default the line goes to stderr. Raises what
    `fill` raises, and OSError; the unfinished folder is then removed.
    """
    note = note or _say
    folder.parent.mkdir(parents=True, exist_ok=True)
    watch = _Watch(note, folder)
    while not folder.exists():
        number, newest = max(_attempts(folder), default=(0, None))
        if newest is not None and not watch.is_gone(newest):
            continue
        own = folder.with_name(f".{folder.name}.{number + 1}")
        try:
            own.mkdir()
        except FileExistsError:  # another was first to see that
            continue
        _make(folder, own, fill)


def _make(folder: Path, own: Path, fill: Callable[[Path], None]) -> None:
    try:
        if folder.exists():  # by one that finished since we looked
            return
        with _beating(own / MAKER):
            fill(own)
        own.rename(folder)
    except Exception:
        if not folder.exists():  # else another process was first, and may have taken things away
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if folder.exists():
            for _, path in _attempts(folder):
                shutil.rmtree(path, ignore_errors=True)


def _attempts(folder: Path) -> Iterator[tuple[int, Path]]:
    """The folders that makers work in, with their numbers."""
    prefix = f".{folder.name}."
    for name in os.listdir(folder.parent):
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdigit():
            yield int(number), folder.with_name(name)


@dataclass(frozen=True)
class _Maker:
    """A process, and how often it has said that it is alive."""

    host: str
    machine: str
    """A name that tells machines, and containers that count processes by themselves, apart."""
    process: int
    began: float
    """Start of the process, in the machine's own measure."""
    count: int = 0

    @staticmethod
    def me() -> _Maker:
        return _Maker(socket.gethostname(), _machine(), os.getpid(), _start_of(os.getpid()) or 0.0)

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"

    @property
    def ended(self) -> bool:
        """Whether the process is known to have ended: it is of this machine and not there."""
        if self.machine != _machine():
            return False
        began = _start_of(self.process)
        return began is None or began != self.began


def _machine() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _start_of(process: int) -> float | None:
    """When a process of this machine began, 0 where that is not told; None if there is none."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{process}/stat").read_text()
        state, *fields = stat[stat.rindex(")") + 2 :].split()
        return None if state == "Z" else float(fields[18])
    return 0.0


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Write to `path` every few seconds that this process is alive; remove it afterwards."""
    me, done = asdict(_Maker.me()), threading.Event()

    def beat() -> None:
        count = 0
        while True:
            with contextlib.suppress(OSError):  # a full disk, or what others took away
                fresh = path.with_name(f".{MAKER}")
                fresh.write_text(json.dumps({**me, "count": count}))
                fresh.rename(path)
            if done.wait(BEAT_S):
                return
            count += 1

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


class _Watch:
    """Makers that a waiting process has seen."""

    def __init__(self, note: Callable[[str], None], folder: Path) -> None:
        self.note = note
        self.folder = folder
        self._began = time.monotonic()
        self._seen: tuple[Path, _Maker | None] | None = None
        self._since = 0.0
        self._told: Path | None = None

    def is_gone(self, attempt: Path) -> bool:
        """Whether the maker in `attempt` is gone; if not, returns after a pause."""
        maker, now = _read(attempt), time.monotonic()
        if self._seen != (attempt, maker):
            self._seen, self._since = (attempt, maker), now
        name = "a process that did not say which" if maker is None else str(maker)
        if (maker is not None and maker.ended) or now - self._since > STALE_S:
            self.note(f"{name}, which prepared {self.folder}, is gone: taking over")
            return True
        if self._told != attempt and maker is not None:
            self.note(f"waiting for {name}, which prepares {self.folder}")
            self._told = attempt
        time.sleep(min(max(POLL_S[0], (now - self._began) / 20), POLL_S[1]))
        return False


def _read(attempt: Path) -> _Maker | None:
    """The maker that works in `attempt`; None if its file is missing or unreadable."""
    try:
        return _Maker(**json.loads((attempt / MAKER).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"megapipe: {line}", file=sys.stderr, flush=True)
