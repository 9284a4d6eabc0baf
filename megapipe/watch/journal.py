"""The journal of a rank: what the rank does at present, and which ranks it waits for.

A journal is a small file that is mapped into memory by the rank, which writes it, and by the node's
monitor, which reads it (:mod:`megapipe.watch.monitor`). An entry costs the rank a fraction of a
microsecond and no system call. The journal stays readable whatever the rank does next, even if the
rank is suspended or never releases the GIL.

Ranks exchange data over communicators: process groups and channels. A communicator is called a
*line* in the journal. Each rank counts the exchanges that it has begun on each line. A rank that
waits for its n-th exchange on a line waits for the ranks that have begun fewer exchanges there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from megapipe.watch.compute_time import ComputeTime

P = ParamSpec("P")
T = TypeVar("T")

PID, BEATS, STEP, LINE, EXCHANGE, VERDICT, LEFT, LOST = range(8)
"""Indices of words in a journal. PID: process id. BEATS: number of heartbeats. STEP: current step,
from 1. LINE: number, from 1, of the communicator at which the rank waits; 0: no wait. EXCHANGE:
number of the exchange there. VERDICT: 1 once the monitor has found a hang. LEFT: 1 once the rank
leaves. LOST: 1 once the rank has lost contact with another rank."""
_FIRST = 8
WORDS = 512
"""Number of 8-byte words: those above, and a count of exchanges for each communicator."""
TEXT = 120
"""Bytes for each of two texts: the rank's activity, and its coordinates in the mesh."""
_DOES = slice(8 * WORDS, 8 * WORDS + TEXT)
_COORDINATES = slice(_DOES.stop, _DOES.stop + TEXT)
SIZE = _COORDINATES.stop
PREFIX = "rank-"
"""Beginning of a journal's file name, before the rank. A second file, whose name ends in `.lines`,
lists the communicators."""


class Journal:
    """The journal that this rank writes; no monitor reads it until :meth:`publish` is called."""

    def __init__(self) -> None:
        self.own_time = ComputeTime()
        self._lines: list[tuple[str, Sequence[int]]] = []
        self._file: Path | None = None
        self._use(memoryview(bytearray(SIZE)))

    def _use(self, memory: memoryview) -> None:
        self.words = memory[: 8 * WORDS].cast("q")
        self.note = memory[_DOES]
        """Buffer of `TEXT` bytes for the rank's present activity, as :func:`text` encodes it."""
        self._coordinates = memory[_COORDINATES]

    def publish(self, folder: Path, rank: int) -> None:
        """Keep the journal in a file of `folder` from now on. Call this before :meth:`counter`."""
        assert not self._lines
        self._file = folder / f"{PREFIX}{rank}"
        fresh = folder / f".{PREFIX}{rank}"
        fresh.write_bytes(bytes(SIZE))
        self._use(memoryview(_mapped(fresh)))
        self.words[PID] = os.getpid()
        fresh.rename(self._file)

    def withdraw(self) -> None:
        """Record that the rank leaves. Then the monitor may remove the file."""
        self.words[LEFT] = 1
        self._file = None

    def counter(
        self, name: str, ranks: Sequence[int], *, heeds: Sequence[int] | None = None
    ) -> CommCounter:
        """Make the counter of a communicator. All its `ranks` use the same `name`. `heeds`: ranks
        that this rank waits for on this communicator, by default all."""
        number = len(self._lines)
        self._lines.append((name, ranks if heeds is None else heeds))
        if self._file is not None:
            with open(f"{self._file}.lines", "a") as file:
                print(name, *self._lines[-1][1], file=file)
        return CommCounter(self, min(number, WORDS - _FIRST - 1))

    def set_activity(self, name: bytes) -> None:
        """Record the rank's present activity, encoded by :func:`text` into `TEXT` bytes."""
        self.note[:] = name

    def trains(self, step: int) -> None:
        """Record the current step, counted from 1."""
        self.words[STEP] = step

    def waits(self) -> bytes | None:
        """Return the 8-byte words that describe the present wait, to be compared; None: no wait."""
        words = self.words
        return bytes(words[STEP:VERDICT]) + bytes(words[_FIRST:]) if words[LINE] else None

    def is_at(self, coordinates: str) -> None:
        """Record the rank's coordinates in the mesh."""
        self._coordinates[:] = text(coordinates)


class CommCounter:
    """This rank's count of exchanges on a communicator. Counters share a word in a full journal."""

    def __init__(self, journal: Journal, number: int) -> None:
        self.words = journal.words
        self.at = _FIRST + number
        """Index of the journal's word with the count of exchanges."""
        self._number = number
        self._own_time = journal.own_time

    def count(self) -> int:
        """Record that an exchange begins. Return the number of the exchange, from 1."""
        words = self.words
        number = words[self.at] + 1
        words[self.at] = number
        return number

    def wait(self, exchange: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call`, which waits for an exchange, and record the wait. Return the result."""
        words, own = self.words, self._own_time
        words[EXCHANGE] = exchange
        words[LINE] = self._number + 1
        if own.inside:
            result = own.waiting(call, *args, **kwargs)
        else:
            result = call(*args, **kwargs)
        words[LINE] = 0
        return result


def unwatched() -> CommCounter:
    """Return the counter of a communicator that no monitor observes."""
    return Journal().counter("", ())


def text(name: str) -> bytes:
    """Encode a text for a journal, cut or padded to `TEXT` bytes."""
    return name.encode()[:TEXT].ljust(TEXT)


class JournalState(NamedTuple):
    """The contents of a journal."""

    pid: int
    beats: int
    step: int
    """Current step, counted from 1; 0 outside of training."""
    does: str
    coordinates: str
    """Coordinates in the mesh, as text; "" before the mesh exists."""
    begun: dict[str, int]
    """Number of exchanges that the rank has begun, by communicator."""
    line: str | None
    """Communicator at which the rank waits; None: the rank does not wait."""
    exchange: int
    """Number of the exchange that the rank waits for."""
    waits_for: tuple[int, ...]
    """Ranks for which the rank may be waiting."""
    left: bool
    lost_contact: bool = False
    """Whether the rank has lost contact with some other rank and cannot tell with which."""


class JournalReader:
    """Reads a journal that a rank writes into a file."""

    def __init__(self, file: Path) -> None:
        self.rank = int(file.name.removeprefix(PREFIX))
        self._lines_file = Path(f"{file}.lines")
        self._lines_size = 0
        self._lines: list[tuple[str, tuple[int, ...]]] = []
        self._memory = _mapped(file)

    def look(self) -> tuple[int, bytes]:
        """Return the number of heartbeats, and the other contents as bytes for comparison."""
        content = self._memory[:]
        beats = slice(8 * BEATS, 8 * BEATS + 8)
        count = int.from_bytes(content[beats], "little")
        return count, content[: beats.start] + content[beats.stop :]

    def read(self) -> JournalState:
        """Decode the present contents of the journal."""
        content = self._memory[:]
        words = memoryview(content)[: 8 * WORDS].cast("q")
        lines = self._known_lines()
        begun = {
            name: words[_FIRST + number]
            for number, (name, _) in enumerate(lines[: WORDS - _FIRST - 1])
        }
        at = words[LINE] - 1
        known = 0 <= at < len(lines)
        return JournalState(
            pid=words[PID],
            beats=words[BEATS],
            step=words[STEP],
            does=_name(content[_DOES]),
            coordinates=_name(content[_COORDINATES]),
            begun=begun,
            line=lines[at][0] if known else None,
            exchange=words[EXCHANGE],
            waits_for=lines[at][1] if known else (),
            left=bool(words[LEFT]),
            lost_contact=bool(words[LOST]),
        )

    def _known_lines(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the communicators so far, each with the ranks that this rank waits for on it."""
        try:
            size = self._lines_file.stat().st_size
        except OSError:
            return self._lines
        if size != self._lines_size:
            rows = self._lines_file.read_text().split("\n")[:-1]
            pairs = (row.split(" ") for row in rows)
            self._lines = [(name, tuple(map(int, ranks))) for name, *ranks in pairs]
            self._lines_size = size
        return self._lines

    def announce_verdict(self) -> None:
        """Tell the rank that the monitor has a verdict."""
        self._memory[8 * VERDICT] = 1


def _name(field: bytes) -> str:
    return field.decode(errors="replace").strip("\0 ")


def _mapped(file: Path) -> mmap.mmap:
    handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)
