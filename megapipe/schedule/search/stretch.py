"""An order for more micro-batches: the steady state of a shorter one, repeated.

A segment of a rank's list is balanced where each stream of the rank occurs equally often in it, k
times. Repeated, it takes k more micro-batches (the repetend of Tessel, 2311.15269).
"""

from collections import defaultdict
from collections.abc import Iterator

from megapipe.schedule.search.problem import Order, Problem, TimedOrder

LONGEST = 4
"""Micro-batches of the longest segment that is tried."""
PLACES = (0.5, 0.4, 0.6, 0.35, 0.45, 0.55, 0.65)
"""Where in its list the middle of a segment should be."""


def stretched(short: Problem, order: Order, problem: Problem, count: int) -> list[TimedOrder]:
    """Orders of a problem, made of one with fewer micro-batches; at most `count` are timed."""
    words = [[op // short.microbatches for op in ops] for ops in order]
    orders: list[Order] = []
    for candidate in _repeated(words, problem.microbatches - short.microbatches):
        longer = _numbered(candidate, problem.microbatches)
        if len(orders) < count and longer not in orders and problem.fits(longer):
            orders.append(longer)
    return [timed for longer in orders if (timed := problem.timed(longer)) is not None]


def _repeated(words: list[list[int]], more: int) -> Iterator[list[list[int]]]:
    """The streams of each rank's operations, with segments repeated for `more` micro-batches or,
    where their length does not divide that, a few too many."""
    segments = [_balanced(word) for word in words]
    for length in range(1, LONGEST + 1):
        if all(length in by_length for by_length in segments):
            for place in PLACES:
                longer = []
                for word, by_length in zip(words, segments, strict=True):
                    middle = 2 * place * len(word)
                    start, stop = min(by_length[length], key=lambda cut: abs(sum(cut) - middle))
                    again = word[start:stop] * -(-more // length)
                    longer.append(word[:stop] + again + word[stop:])
                yield longer


def _balanced(word: list[int]) -> dict[int, list[tuple[int, int]]]:
    """The balanced segments of a list of streams, by the number of micro-batches."""
    streams = sorted(set(word))
    counts = dict.fromkeys(streams, 0)
    seen: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    segments: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place in range(len(word) + 1):
        base = counts[streams[0]]
        lead = tuple(count - base for count in counts.values())
        for start, at_start in seen[lead]:
            if 1 <= base - at_start <= LONGEST:
                segments[base - at_start].append((start, place))
        seen[lead].append((place, base))
        if place < len(word):
            counts[word[place]] += 1
    return segments


def _numbered(words: list[list[int]], microbatches: int) -> Order:
    """The order of lists of streams; micro-batches that are too many are left out."""
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
