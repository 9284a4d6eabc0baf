"""Positions that the rows of a tensor have in their sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class StridedRange(NamedTuple):
    """A range of `length` rows that hold every `step`-th position from position `first` on."""

    first: int
    length: int
    step: int = 1

    @property
    def last(self) -> int:
        return self.first + (self.length - 1) * self.step

    @property
    def here(self) -> slice:
        """The positions as a slice, to index a tensor of the whole sequence."""
        return slice(self.first, self.last + 1, self.step)

    def rows(self, start: int, stop: int) -> StridedRange:
        """Return the positions of rows start .. stop - 1 of the range."""
        return StridedRange(self.first + start * self.step, stop - start, self.step)


@dataclass(frozen=True)
class Positions:
    """Positions of a tensor's rows, as a list of ranges. They ascend within a sequence slice."""

    runs: tuple[StridedRange, ...]

    @classmethod
    def whole(cls, length: int, first: int = 0) -> Positions:
        """Return `length` consecutive positions from `first` on."""
        return cls((StridedRange(first, length),))

    @classmethod
    def of(cls, runs: Iterable[StridedRange]) -> Positions:
        """Build positions from ranges; join each range that continues the one before it."""
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
        """Yield the position of each row."""
        for run in self.runs:
            yield from range(run.first, run.last + 1, run.step)

    def rows(self, start: int, stop: int) -> Positions:
        """Return the positions of rows start .. stop - 1."""
        found, before = [], 0
        for run in self.runs:
            a, b = max(start - before, 0), min(stop - before, run.length)
            if a < b:
                found.append(run.rows(a, b))
            before += run.length
        return Positions(tuple(found))

    def part(self, index: int, parts: int) -> Positions:
        """Cut the rows into `parts` equal parts, and return the positions of part `index`."""
        size = self.count // parts
        return self.rows(index * size, (index + 1) * size)
