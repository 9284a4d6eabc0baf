"""Decisions of all policies, for processes that are compared."""

from megapipe.experts.balance import balance
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import find_pool
from megapipe.experts.row_routing import evenly
from megapipe.experts.shadow import ShadowCosts, shadow

TRACE = [[(7 * e + 5 * step) % 13 + 40 * (e == step % 8) for e in range(8)] for step in range(12)]


def decisions() -> list[object]:
    """Return the maps for some rows, many of which are equal."""
    begin = ExpertMap.even(8, 4, 2)
    counts = evenly(TRACE[0], 4)
    found = [balance(begin, counts, 2), shadow(begin, counts, ShadowCosts(1, 1, 5))]
    return [each.plain() for each in (*found, *find_pool(ExpertMap.even(8, 4), TRACE, 3))]
