"""Orders for more micro-batches: the steady state of an order for fewer micro-batches, repeated.

A stream is one kind of operation at one stage. A segment of a rank's list is *balanced* if each
stream of the rank occurs equally often in it, k times. Repeated, it runs k more micro-batches (the
repetend of Tessel, 2311.15269).
"""

from collections import defaultdict
from collections.abc import Iterator

from megapipe.schedule.search.problem import Order, Problem, TimedOrder

LONGEST = 4
"""Maximum number of micro-batches per segment."""
MIDDLES = (0.5, 0.4, 0.6, 0.35, 0.45, 0.55, 0.65)
"""Positions tried for the middle of a segment, as shares of the list's length."""


def stretched(short: Problem, order: Order, problem: Problem, count: int) -> list[TimedOrder]:
    """Return timed orders of `problem`, stretched from `order`, which solves the same problem for
    fewer micro-batches (`short`). At most `count` orders are timed."""
    words = [[op // short.microbatches for op in ops] for ops in order]
    orders: list[Order] = []
    for candidate in _repeated(words, problem.microbatches - short.microbatches):
        longer = _numbered(candidate, problem.microbatches)
        if len(orders) < count and longer not in orders and problem.fits(longer):
            orders.append(longer)
    return [timed for longer in orders if (timed := problem.timed(longer)) is not None]


def _repeated(words: list[list[int]], more: int) -> Iterator[list[list[int]]]:
    """Yield longer lists of streams, one per rank. A segment of each list is repeated to make the
    list longer by at least `more` micro-batches."""
    segments = [_balanced(word) for word in words]
    for length in range(1, LONGEST + 1):
        if all(length in by_length for by_length in segments):
            for share in MIDDLES:
                longer = []
                for word, by_length in zip(words, segments, strict=True):
                    middle = 2 * share * len(word)
                    start, stop = min(by_length[length], key=lambda cut: abs(sum(cut) - middle))
                    repeated = word[start:stop] * -(-more // length)
                    longer.append(word[:stop] + repeated + word[stop:])
                yield longer


def _balanced(word: list[int]) -> dict[int, list[tuple[int, int]]]:
    """Return the balanced segments of a list of streams as (start, stop), by their number of
    micro-batches."""
    streams = sorted(set(word))
    counts = dict.fromkeys(streams, 0)
    seen: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    segments: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in range(len(word) + 1):
        base = counts[streams[0]]
        lead = tuple(count - base for count in counts.values())
        for start, at_start in seen[lead]:
            if 1 <= base - at_start <= LONGEST:
                segments[base - at_start].append((start, index))
        seen[lead].append((index, base))
        if index < len(word):
            counts[word[index]] += 1
    return segments


def _numbered(words: list[list[int]], microbatches: int) -> Order:
    """Convert lists of streams, one per rank, to an order without the excess micro-batches."""
    order: Order = []
    for word in words:
        done = dict.fromkeys(word, 0)
        ops = []
        for stream in word:
            if done[stream] < microbatches:
                ops.append(stream * microbatches + done[stream])
                done[stream] += 1
        order.append(ops)
    return order
