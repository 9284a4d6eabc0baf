"""Samples that no step of a run takes.

A run counts the samples that it takes, and a sample has a number, which says what it is. The two
differ by what is left out: then the next sample has a larger number, and all else of a step stays
as it was, its batch and its learning rate included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges [first, stop) of sample numbers, in order, with numbers between them."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> SkippedSamples:
        """Ranges in any order, which may overlap."""
        joined: list[tuple[int, int]] = []
        for first, stop in sorted(map(tuple, ranges)):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((first, stop))
        return cls(tuple(joined))

    @classmethod
    def stored(cls, value: Any) -> SkippedSamples:
        """Pairs of numbers, as JSON has them. Raises ValueError for anything else."""
        if not isinstance(value, list) or not all(map(_is_range, value)):
            raise ValueError(f"{value}: expected pairs of sample numbers")
        return cls.of(value)

    def __str__(self) -> str:
        """The ranges, as a configuration has them."""
        return "[" + ",".join(f"[{first},{stop}]" for first, stop in self.ranges) + "]"

    def union(self, other: SkippedSamples) -> SkippedSamples:
        """All that either leaves out."""
        return SkippedSamples.of((*self.ranges, *other.ranges))

    def since(self, number: int) -> SkippedSamples:
        """The part from a number on."""
        return SkippedSamples(
            tuple((max(first, number), stop) for first, stop in self.ranges if stop > number)
        )

    def going_on(self, more: SkippedSamples, taken: int) -> SkippedSamples:
        """All that a run leaves out which goes on after so many samples: this, and `more` as far as
        it is not behind."""
        return self.union(more.since(self.number_after(taken)))

    def number_after(self, taken: int) -> int:
        """The number of the sample that is next after so many."""
        for first, stop in self.ranges:
            if taken < first:
                break
            taken += stop - first
        return taken

    def numbers(self, taken: int, count: int) -> Sequence[int]:
        """The numbers of the next `count` samples after so many."""
        first = self.number_after(taken)
        if count == 0 or self.number_after(taken + count - 1) == first + count - 1:
            return range(first, first + count)
        return [self.number_after(each) for each in range(taken, taken + count)]

    def counts(self, before: Callable[[int], Sequence[int]], taken: int) -> list[int]:
        """Those of the first `taken` samples that belong to each of several parts; `before` tells
        how many numbers below one do."""
        end = self.number_after(taken)
        counts = list(before(end))
        for first, stop in self.ranges:
            if stop <= end:
                gone = zip(before(stop), before(first), strict=True)
                counts = [n - (b - a) for n, (b, a) in zip(counts, gone, strict=True)]
        return counts


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(number) is int for number in value)
        and 0 <= value[0] < value[1]
    )
