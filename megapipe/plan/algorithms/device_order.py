"""Orders of devices in which neighbours have fast links, by minimum cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import inf

Bandwidth = Callable[[int, int], float]
"""Function that returns the bandwidth between two devices."""


def by_minimum_cuts(devices: Sequence[int], bandwidth: Bandwidth) -> list[int]:
    """Split devices where the bandwidth between both sides is least, order each side in the same
    way, and join the sides at their fastest ends."""
    if len(devices) < 3:
        return list(devices)
    side = minimum_cut(devices, bandwidth)
    both = [side, [each for each in devices if each not in side]]
    first, second = (by_minimum_cuts(each, bandwidth) for each in both)
    turned = product((first, first[::-1]), (second, second[::-1]))
    left, right = max(turned, key=lambda pair: bandwidth(pair[0][-1], pair[1][0]))
    return left + right


def minimum_cut(devices: Sequence[int], bandwidth: Bandwidth) -> list[int]:
    """Return one side of the cut with the least bandwidth (Stoer and Wagner, 1997).

    In each phase, the vertex that is bound most to those before it is taken next. Cutting off the
    last one is the best cut between the last two, so these are merged for the next phase.
    """
    merged = {each: [each] for each in devices}
    weight = {(a, b): bandwidth(a, b) + bandwidth(b, a) for a, b in product(devices, repeat=2)}
    least, best = inf, list[int]()
    while len(merged) > 1:
        rest = dict.fromkeys(merged, 0.0)
        last = before = next(iter(rest))
        while rest:
            before, last = last, max(rest, key=rest.__getitem__)
            bound = rest.pop(last)
            for other in rest:
                rest[other] += weight[last, other]
        if bound < least:
            least, best = bound, list(merged[last])
        merged[before] += merged.pop(last)
        for other in merged:
            if other != before:
                weight[before, other] += weight[last, other]
                weight[other, before] = weight[before, other]
    return best
