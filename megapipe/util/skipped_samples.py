"""Skipped samples: samples that no step of a run takes.

Every sample of the data has a number. A run counts only the samples that it takes, so the number of
its next sample is this count plus the skipped samples before it. Skipping makes that number larger,
but changes nothing else in a step, such as its batch size and learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SkippedSamples:
    """Ranges [first, stop) of skipped sample numbers, ascending, with gaps between them."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[Sequence[int]]) -> SkippedSamples:
        """Build this object from ranges [first, stop) in any order; they may overlap."""
        joined: list[tuple[int, int]] = []
        for first, stop in sorted(map(tuple, ranges)):
            if joined and first <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((first, stop))
        return cls(tuple(joined))

    @classmethod
    def stored(cls, value: Any) -> SkippedSamples:
        """Build this object from a list of pairs [first, stop], as read from JSON. Raises
        ValueError if `value` is something else."""
        if not isinstance(value, list) or not all(map(_is_range, value)):
            raise ValueError(f"{value}: expected pairs of sample numbers")
        return cls.of(value)

    def __str__(self) -> str:
        """Return the ranges as written in a configuration."""
        return "[" + ",".join(f"[{first},{stop}]" for first, stop in self.ranges) + "]"

    def union(self, other: SkippedSamples) -> SkippedSamples:
        """Return the samples that are skipped by this object, by `other`, or by both."""
        return SkippedSamples.of((*self.ranges, *other.ranges))

    def since(self, number: int) -> SkippedSamples:
        """Return the parts of the ranges from sample number `number` on."""
        return SkippedSamples(
            tuple((max(first, number), stop) for first, stop in self.ranges if stop > number)
        )

    def going_on(self, more: SkippedSamples, taken: int) -> SkippedSamples:
        """Return the skipped samples of a run that has taken `taken` samples and now also skips
        the samples `more`. Samples of `more` that the run has passed already are left out."""
        return self.union(more.since(self.number_after(taken)))

    def number_after(self, taken: int) -> int:
        """Return the number of the next sample of a run that has taken `taken` samples."""
        for first, stop in self.ranges:
            if taken < first:
                break
            taken += stop - first
        return taken

    def numbers(self, taken: int, count: int) -> Sequence[int]:
        """Return the numbers of the `count` samples that a run takes after its first `taken`."""
        first = self.number_after(taken)
        if count == 0 or self.number_after(taken + count - 1) == first + count - 1:
            return range(first, first + count)
        return [self.number_after(each) for each in range(taken, taken + count)]

    def counts(self, before: Callable[[int], Sequence[int]], taken: int) -> list[int]:
        """Return how many of the first `taken` samples of a run come from each source. `before`
        returns, for a sample number, how many lower numbers belong to each source, skipped ones
        included."""
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
