"""Which positions of a sequence rows hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class StridedRange(NamedTuple):
    """Rows that hold every `step`-th position, `length` of them, from `first` on."""

    first: int
    length: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.first + (self.length - 1) * self.step

    @property
    def here(self) -> slice:
        """The positions, as an index."""
        return slice(self.first, self.last + 1, self.step)

    def rows(self, start: int, stop: int) -> StridedRange:
        """Its rows start .. stop - 1."""
        return StridedRange(self.first + start * self.step, stop - start, self.step)


@dataclass(frozen=True)
class Positions:
    """The positions of rows, in runs that follow each other; they ascend within a slice."""

    runs: tuple[StridedRange, ...]

    @classmethod
    def whole(cls, length: int, first: int = 0) -> Positions:
        """`length` positions in a row."""
        return cls((StridedRange(first, length),))

    @classmethod
    def of(cls, runs: Iterable[StridedRange]) -> Positions:
        """Of these runs; a run that goes on with the one before it is joined to that."""
        found: list[StridedRange] = []
        for run in runs:
            if found and run.step == found[-1].step and run.first == found[-1].last + run.step:
                found[-1] = found[-1]._replace(length=found[-1].length + run.length)
            elif run.length:
                found.append(run)
        return cls(tuple(found))

    @cached_property
    def count(self) -> int:
        """Number of rows."""
        return sum(run.length for run in self.runs)

    def __iter__(self) -> Iterator[int]:
        """The position of each row."""
        for run in self.runs:
            yield from range(run.first, run.last + 1, run.step)

    def rows(self, start: int, stop: int) -> Positions:
        """The positions of rows start .. stop - 1."""
        found, before = [], 0
        for run in self.runs:
            a, b = max(start - before, 0), min(stop - before, run.length)
            if a < b:
                found.append(run.rows(a, b))
            before += run.length
        return Positions(tuple(found))

    def part(self, index: int, parts: int) -> Positions:
        """One of `parts` equal parts of the rows."""
        size = self.count // parts
        return self.rows(index * size, (index + 1) * size)
