"""Finds the positions at which sequences are cut into slices.

Under a causal mask the token at position t attends to t+1 positions. So among slices with equally
many tokens the last one costs most, and every stage of the pipeline waits for it.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from megapipe.errors import ConfigError

MOST_PIECES = 128
"""Number of ranges into which :func:`fastest_slices` first divides a sequence, rounded up to a
multiple of the number of slices if that number is given."""


def balanced_slices(
    first: Callable[[int], int], length: int, count: int, multiple: int = 1
) -> tuple[int, ...]:
    """Return the lengths of `count` slices of equal FLOPs or times.

    The i-th cut is the multiple nearest to the position where i of `count` equal shares of the time
    are reached. So with a multiple of 1 every slice is within one token's time of its share
    (Seq1F1B, 2406.03488). An overhead that is equal for all slices would move no cut.

    Args:
        first: function that returns the FLOPs or the time of the first n tokens of a sequence.
        length: tokens of the whole sequence.
        count: number of slices.
        multiple: each length is a multiple of this (tp, under sequence parallelism).

    Raises:
        ConfigError: more slices than multiples, or a length that is not a multiple.
    """
    points = _points(length, count, multiple)
    total = first(length)

    def scaled(point: int) -> int:
        return count * first(point * multiple)

    cuts = [0]
    for index in range(1, count):
        share = index * total
        above = bisect_left(range(points), share, key=scaled)
        nearest = above if scaled(above) - share < share - scaled(above - 1) else above - 1
        cuts.append(min(max(nearest, cuts[-1] + 1), points - (count - index)))
    return tuple((b - a) * multiple for a, b in pairwise([*cuts, points]))


def fastest_slices(
    time: Callable[[int, int], int],
    length: int,
    ranks: int | Fraction,
    *,
    count: int | None = None,
    microbatches: int = 1,
    multiple: int = 1,
) -> tuple[int, ...]:
    """Find the slice lengths with the shortest pipeline by dynamic programming (2102.07988).

    On p equal stages, m micro-batches in slices of times t_1 .. t_k take m (t_1 + .. + t_k) + (p-1)
    max t_i. The search finds the cut with the least sum, then the least sum with a shorter longest
    slice, and so on until m times the sum exceeds the best pipeline.

    A sequence of up to 128 times `multiple` tokens may be cut at each multiple, and the result is
    optimal. A longer sequence is divided into ranges of equal time, and slices are joined from
    ranges. Then the cuts are refined together: each may move by up to a range, in steps of half a
    range, then of a quarter, and so on down to one multiple.

    Args:
        time: measured or modelled time of a slice as an integer, from its length and the number
            of tokens before it; a longer slice must take longer.
        length: tokens of the whole sequence.
        ranks: pipeline ranks, p; for unequal stages, the sum of their times divided by that of the
            slowest.
        count: number of slices, k; default: any up to 128.
        microbatches: micro-batches of a step, m.
        multiple: each length is a multiple of this.

    Raises:
        ConfigError: more slices than multiples, or a length that is not a multiple.
    """
    points = _points(length, count or 1, multiple)
    pieces = points
    candidates: Sequence[int] = range(points + 1)
    if points > MOST_PIECES:
        pieces = min(points, (count or 1) * -(-MOST_PIECES // (count or 1)))
        even = balanced_slices(lambda n: time(n, 0) - time(0, 0), length, pieces, multiple)
        candidates = [end // multiple for end in accumulate(even, initial=0)]
    step, spare = -(-points // pieces), pieces + 1 - (count or 1)

    @cache
    def between(start: int, stop: int) -> int:
        return time((stop - start) * multiple, start * multiple)

    def fastest(ends: Sequence[Sequence[int]], *, any_number: bool = False) -> tuple[int, ...]:
        return _fastest(between, ends, ranks, microbatches, any_number=any_number)

    if count is None:
        cuts = fastest([[end] for end in candidates[1:]], any_number=True)
    else:
        cuts = fastest([*(candidates[i : i + spare] for i in range(1, count)), [points]])
    while step > 1:
        step = -(-step // 2)
        near = [range(cut - 2 * step, cut + 2 * step + 1, step) for cut in cuts[1:-1]]
        cuts = fastest([*([end for end in ends if 0 < end < points] for ends in near), [points]])
    return tuple((b - a) * multiple for a, b in pairwise(cuts))


class _Cut(NamedTuple):
    """A division of the first part of a sequence into slices; the smallest tuple is the best."""

    total: int
    longest: int
    """Time of the longest slice."""
    ends: tuple[int, ...]
    """Position 0, and the end of each slice."""


def _fastest(
    time: Callable[[int, int], int],
    ends: Sequence[Sequence[int]],
    ranks: int | Fraction,
    microbatches: int,
    *,
    any_number: bool,
) -> tuple[int, ...]:
    """Return position 0 and the ends of the slices with which the pipeline is shortest.

    `time`: function (start, end) -> time of a slice. `ends`: for each slice, the positions where it
    can end. With `any_number` there can be fewer slices than items in `ends`.
    """
    best: tuple[int | Fraction, tuple[int, ...]] | None = None
    limit: float = inf
    while True:
        cut = _cheapest(time, ends, limit, any_number=any_number)
        if cut is None or (best is not None and microbatches * cut.total >= best[0]):
            assert best is not None
            return best[1]
        pipeline = microbatches * cut.total + (ranks - 1) * cut.longest
        if best is None or pipeline < best[0]:
            best = pipeline, cut.ends
        limit = cut.longest


def _cheapest(
    time: Callable[[int, int], int],
    ends: Sequence[Sequence[int]],
    limit: float,
    *,
    any_number: bool,
) -> _Cut | None:
    """Find the cut with the least total time whose slices all take less than `limit`; of equal
    cuts, the one with the shortest longest slice. None if no cut keeps the limit."""
    reached = {0: _Cut(0, 0, (0,))}
    for choice in ends:
        following = dict(reached) if any_number else {}
        for end in choice:
            options = [
                (cut.total + taken, max(cut.longest, taken), start)
                for start, cut in reached.items()
                if start < end and (taken := time(start, end)) < limit
            ]
            if options:
                total, longest, start = min(options)
                following[end] = _Cut(total, longest, (*reached[start].ends, end))
        reached = following
    return reached.get(ends[-1][-1])


def _points(length: int, count: int, multiple: int) -> int:
    """Return how many times `multiple` is in `length`. Raises :class:`ConfigError` for a wrong
    length or number of slices."""
    if length % multiple:
        below = length - length % multiple
        raise ConfigError(
            f"sequence_slices: a sequence of {length} tokens is not a multiple of {multiple}; "
            f"the nearest are {below} and {below + multiple}"
        )
    if not 1 <= count <= length // multiple:
        raise ConfigError(
            f"sequence_slices: {count} slices of a sequence of {length} tokens in multiples "
            f"of {multiple}: expected 1 to {length // multiple}, or {count} of "
            f"{count * multiple} tokens"
        )
    return length // multiple
