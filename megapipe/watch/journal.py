"""The journal of a rank: what it does at present, and whom it waits for.

A journal is a small file that is mapped into the memory of the rank, which writes it, and of the
node's monitor, which reads it (:mod:`megapipe.watch.monitor`). A note costs the rank a fraction of
a microsecond and no call of the system's, and it is there whatever the rank does next: it may be
stopped, or hold Python's lock for ever.

Ranks that wait for each other exchange something over a *line*: a process group, or a channel from
one to another. Each counts the exchanges that it has begun there. A rank that waits for its n-th
exchange waits for those that have begun fewer.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

from megapipe.watch.own_time import ComputeTime

P = ParamSpec("P")
T = TypeVar("T")

PID, BEATS, STEP, LINE, EXCHANGE, VERDICT, LEFT, LOST = range(8)
"""Words of a journal: the process; how often its heart has beaten; the step that it trains, counted
from 1; the line that it waits at, counted from 1, and the number of the exchange there; 1 once the
monitor has found that the job hangs; 1 once the rank is leaving; 1 once it has lost contact with
another."""
_FIRST = 8
WORDS = 512
"""Words of 8 bytes: those above, and a count of exchanges for each line."""
TEXT = 120
"""Bytes of the name of what the rank does, and of that of its place in the mesh."""
_DOES = slice(8 * WORDS, 8 * WORDS + TEXT)
_PLACE = slice(_DOES.stop, _DOES.stop + TEXT)
SIZE = _PLACE.stop
PREFIX = "rank-"
"""Of a journal's file name; the rank follows. The lines are in a file that ends in `.lines`."""


class Journal:
    """The journal that this rank writes: at first in memory of its own, which nobody reads."""

    def __init__(self) -> None:
        self.own_time = ComputeTime()
        self._lines: list[tuple[str, Sequence[int]]] = []
        self._file: Path | None = None
        self._use(memoryview(bytearray(SIZE)))

    def _use(self, memory: memoryview) -> None:
        self.words = memory[: 8 * WORDS].cast("q")
        self.note = memory[_DOES]
        """Takes what the rank does from now on, in `TEXT` bytes, as :func:`text` makes them."""
        self._place = memory[_PLACE]

    def publish(self, folder: Path, rank: int) -> None:
        """Have it in a file of `folder` from now on; to be called before there is any line."""
        assert not self._lines
        self._file = folder / f"{PREFIX}{rank}"
        fresh = folder / f".{PREFIX}{rank}"
        fresh.write_bytes(bytes(SIZE))
        self._use(memoryview(_mapped(fresh)))
        self.words[PID] = os.getpid()
        fresh.rename(self._file)

    def withdraw(self) -> None:
        """Note that the rank leaves; the monitor may then remove the file."""
        self.words[LEFT] = 1
        self._file = None

    def counter(
        self, name: str, ranks: Sequence[int], *, heeds: Sequence[int] | None = None
    ) -> CommCounter:
        """A line between `ranks`, all of which give it this `name`; of them this one waits for
        those that it `heeds`, by default for all."""
        number = len(self._lines)
        self._lines.append((name, ranks if heeds is None else heeds))
        if self._file is not None:
            with open(f"{self._file}.lines", "a") as file:
                print(name, *self._lines[-1][1], file=file)
        return CommCounter(self, min(number, WORDS - _FIRST - 1))

    def set_activity(self, name: bytes) -> None:
        """Note what the rank does from now on, in `TEXT` bytes, as :func:`text` makes them."""
        self.note[:] = name

    def trains(self, step: int) -> None:
        """Note the step, counted from 1."""
        self.words[STEP] = step

    def waits(self) -> bytes | None:
        """All that the rank has noted, to be compared, if it waits for others."""
        words = self.words
        return bytes(words[STEP:VERDICT]) + bytes(words[_FIRST:]) if words[LINE] else None

    def is_at(self, place: str) -> None:
        """Note the rank's place in the mesh."""
        self._place[:] = text(place)


class CommCounter:
    """This rank's end of a line. More of them than a journal has words for share the last."""

    def __init__(self, journal: Journal, number: int) -> None:
        self.words = journal.words
        self.at = _FIRST + number
        """The word that counts its exchanges."""
        self._number = number
        self._own_time = journal.own_time

    def count(self) -> int:
        """Note that an exchange begins; returns its number, from 1."""
        words = self.words
        number = words[self.at] + 1
        words[self.at] = number
        return number

    def wait(self, exchange: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what waits for an exchange, and note that; returns what it does."""
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
    """A line of which nobody knows."""
    return Journal().counter("", ())


def text(name: str) -> bytes:
    """A name as a journal has it."""
    return name.encode()[:TEXT].ljust(TEXT)


class JournalState(NamedTuple):
    """A journal as it is read."""

    pid: int
    beats: int
    step: int
    """Counted from 1; 0 outside of training."""
    does: str
    place: str
    """Its coordinates in the mesh, in words; empty before there is one."""
    begun: dict[str, int]
    """Exchanges that it has begun, by line."""
    line: str | None
    """The line that it waits at..."""
    exchange: int
    """... for this exchange..."""
    waits_for: tuple[int, ...]
    """... and the ranks that it may be waiting for."""
    left: bool
    lost_contact: bool = False
    """It has lost contact with another, and cannot tell with whom."""


class JournalReader:
    """A journal that a rank writes into a file."""

    def __init__(self, file: Path) -> None:
        self.rank = int(file.name.removeprefix(PREFIX))
        self._lines_file = Path(f"{file}.lines")
        self._lines_size = 0
        self._lines: list[tuple[str, tuple[int, ...]]] = []
        self._memory = _mapped(file)

    def look(self) -> tuple[int, bytes]:
        """How often its heart has beaten, and the rest as it is now, to be compared."""
        content = self._memory[:]
        beats = slice(8 * BEATS, 8 * BEATS + 8)
        count = int.from_bytes(content[beats], "little")
        return count, content[: beats.start] + content[beats.stop :]

    def read(self) -> JournalState:
        """The journal as it is now."""
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
            place=_name(content[_PLACE]),
            begun=begun,
            line=lines[at][0] if known else None,
            exchange=words[EXCHANGE],
            waits_for=lines[at][1] if known else (),
            left=bool(words[LEFT]),
            lost_contact=bool(words[LOST]),
        )

    def _known_lines(self) -> list[tuple[str, tuple[int, ...]]]:
        """The lines so far, each with the ranks that are heeded."""
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

    def tell(self) -> None:
        """Let the rank know that there is a verdict."""
        self._memory[8 * VERDICT] = 1


def _name(field: bytes) -> str:
    return field.decode(errors="replace").strip("\0 ")


def _mapped(file: Path) -> mmap.mmap:
    handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)
