"""Where to cut sequences into slices.

Under a causal mask the token at position t attends to t+1 positions, so of slices with equally many
tokens the last costs most, and every stage of the pipeline waits for it.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from megapipe.errors import ConfigError
from megapipe.schedule.cost import Time

CausalFlops = Callable[[int], int]
"""FLOPs of one layer's forward on the first so many tokens of a sequence."""


def balanced_slices(
    flops: CausalFlops, length: int, count: int, multiple: int = 1
) -> tuple[int, ...]:
    """Lengths of `count` slices of equal FLOPs in a layer: linear parts and causal attention.

    Each cut is the multiple nearest to where the FLOPs reach their share, so with a multiple of 1
    no slice is off its share by more than one token's FLOPs (Seq1F1B, 2406.03488).

    Args:
        flops: those of a layer's forward on the first tokens of a sequence.
        length: tokens of the whole sequence.
        count: number of slices.
        multiple: each length is a multiple of this (tp, under sequence parallelism).

    Raises:
        ConfigError: more slices than multiples, or a length that is not a multiple.
    """
    points = _points(length, count, multiple)
    total = flops(length)

    def scaled(point: int) -> int:
        return count * flops(point * multiple)

    cuts = [0]
    for index in range(1, count):
        share = index * total
        above = bisect_left(range(points), share, key=scaled)
        nearest = above if scaled(above) - share < share - scaled(above - 1) else above - 1
        cuts.append(min(max(nearest, cuts[-1] + 1), points - (count - index)))
    return tuple((b - a) * multiple for a, b in pairwise([*cuts, points]))


def slice_shares(flops: CausalFlops, lengths: Sequence[int]) -> tuple[Fraction, ...]:
    """Share of a layer's FLOPs that each slice of the given length takes (for `Cost.slices`)."""
    total = flops(sum(lengths))
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return tuple(
        Fraction(flops(end) - flops(end - length), total)
        for length, end in zip(lengths, ends, strict=True)
    )


def fastest_slices(
    time: Callable[[int, int], Time],
    length: int,
    ranks: int,
    *,
    count: int | None = None,
    microbatches: int = 1,
    multiple: int = 1,
) -> tuple[int, ...]:
    """The slice lengths with the shortest pipeline, by dynamic programming (TeraPipe, 2102.07988).

    m micro-batches in slices that take t_1 .. t_k take m (t_1 + .. + t_k) + (p-1) max t_i. For each
    possible longest slice the cheapest cut without a longer one is found. With n = length /
    multiple points this takes up to n^2/2 times k n^2/2 steps: choose a coarse multiple.

    Args:
        time: measured or modelled time of a slice, from its length and the tokens before it.
        length: tokens of the whole sequence.
        ranks: pipeline ranks, p.
        count: number of slices, k; default: any.
        microbatches: micro-batches of a step, m.
        multiple: each length is a multiple of this.

    Raises:
        ConfigError: more slices than multiples, or a length that is not a multiple.
    """
    points = _points(length, count or 1, multiple)
    times = {
        (start, stop): time((stop - start) * multiple, start * multiple)
        for start in range(points)
        for stop in range(start + 1, points + 1)
    }
    best: tuple[Time, tuple[int, ...]] | None = None
    for longest in sorted(set(times.values())):
        if best is not None and (ranks - 1) * longest >= best[0]:
            break
        for total, cuts in _cheapest(times, points, count, longest):
            pipeline = microbatches * total + (ranks - 1) * longest
            if best is None or pipeline < best[0]:
                best = pipeline, cuts
    assert best is not None
    return tuple((b - a) * multiple for a, b in pairwise(best[1]))


def _cheapest(
    times: dict[tuple[int, int], Time], points: int, count: int | None, longest: Time
) -> list[tuple[Time, tuple[int, ...]]]:
    """The cheapest cuts from 0 to `points` in `count` slices, or in each possible number, none of
    which takes more than `longest`: total time and the places of the cuts, ends included."""
    found = []
    ends: dict[int, tuple[Time, tuple[int, ...]]] = {0: (0, (0,))}
    for number in range(1, (count or points) + 1):
        reached: dict[int, tuple[Time, tuple[int, ...]]] = {}
        for start, (total, cuts) in ends.items():
            for stop in range(start + 1, points + 1):
                slice_time = times[start, stop]
                if slice_time <= longest:
                    option = total + slice_time, (*cuts, stop)
                    if stop not in reached or option < reached[stop]:
                        reached[stop] = option
        ends = reached
        if points in ends and count in (None, number):
            found.append(ends[points])
    return found


def _points(length: int, count: int, multiple: int) -> int:
    """Places where the sequence may end a slice."""
    if length % multiple:
        below = length - length % multiple
        raise ConfigError(
            f"slices: a sequence of {length} tokens is not a multiple of {multiple}; "
            f"the nearest are {below} and {below + multiple}"
        )
    if not 1 <= count <= length // multiple:
        raise ConfigError(
            f"slices: {count} slices of a sequence of {length} tokens in multiples of {multiple}; "
            f"there can be 1 to {length // multiple}"
        )
    return length // multiple
