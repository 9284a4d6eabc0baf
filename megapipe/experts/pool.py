"""A pool of owners, found before a run from the counts of another, of which each step takes the
best (SmartMoE, Zhai et al., ATC 2023).

To find good owners takes long, and what a model sends its tokens to comes back in like shapes; so
the search is done once, and a run compares a few maps. No rank gets copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megapipe.experts.map import ExpertMap

Trace = Sequence[Sequence[int]]
"""By step, rows for each expert."""

MOST_PARTS = 64


def largest_load(of: ExpertMap, totals: Sequence[int]) -> int:
    """Rows of the rank with most of them, of experts that it owns."""
    rows = [0] * of.ranks
    for owner, own in zip(of.owners, totals, strict=True):
        rows[owner] += own
    return max(rows)


def moves(before: ExpertMap, after: ExpertMap) -> int:
    """The most experts that a rank gets from others."""
    came = [a for b, a in zip(before.owners, after.owners, strict=True) if a != b]
    return max(map(came.count, came), default=0)


def migrate(
    present: ExpertMap, pool: Sequence[ExpertMap], totals: Sequence[int], worth: float = 0.0
) -> ExpertMap:
    """The map with the smallest largest load, of the present one and those of the pool, of equal
    ones the first. An expert that a rank gets from another counts as `worth` rows."""
    maps = (present, *pool)
    loads = [largest_load(each, totals) for each in maps]
    return maps[_cheapest(loads, [moves(present, each) for each in maps], worth)]


def _cheapest(loads: Sequence[int], moved: Sequence[int], worth: float) -> int:
    prices = [load + worth * each for load, each in zip(loads, moved, strict=True)]
    return prices.index(min(prices))


def find_pool(present: ExpertMap, trace: Trace, size: int, worth: float = 0.0) -> list[ExpertMap]:
    """At most so many maps for :func:`migrate`, for a run that begins with the `present` one.

    Candidates are packed for the sums of the whole trace, of its halves, quarters and so on. One by
    one that is taken with which the trace, replayed, has the smallest sum of largest loads, as long
    as it gets smaller: each step has the map that the counts of the last one have chosen.
    """
    candidates = dict.fromkeys(balanced_owners(present, each) for each in _sums(trace))
    replay = _Replay([present, *candidates], trace, worth)
    pool: list[int] = []
    best = replay.rows(pool)
    while len(pool) < size:
        rows = [replay.rows([*pool, number]) for number in range(len(replay.maps))]
        if min(rows) >= best:
            break
        best = min(rows)
        pool.append(rows.index(best))
    return [replay.maps[number] for number in pool]


class _Replay:
    """A trace with some of these maps, of which the first is that of the beginning."""

    def __init__(self, maps: list[ExpertMap], trace: Trace, worth: float) -> None:
        self.maps = maps
        self._worth = worth
        self._loads = [[largest_load(each, totals) for totals in trace] for each in maps]
        self._moves = [[moves(each, other) for other in maps] for each in maps]

    def rows(self, pool: Sequence[int]) -> float:
        """Of the largest loads of all steps, with what changes count."""
        here, found = 0, float(self._loads[0][0])
        for step in range(1, len(self._loads[0])):
            among = (here, *pool)
            moved = [self._moves[here][each] for each in among]
            loads = [self._loads[each][step - 1] for each in among]
            chosen = _cheapest(loads, moved, self._worth)
            here = among[chosen]
            found += self._loads[here][step] + self._worth * moved[chosen]
        return found


def _sums(trace: Trace) -> list[list[int]]:
    """Rows for each expert in the whole trace, in its halves, and so on."""
    found, parts = [], 1
    while parts <= min(len(trace), MOST_PARTS):
        ends = [len(trace) * i // parts for i in range(parts + 1)]
        for first, stop in pairwise(ends):
            found.append(list(map(sum, zip(*trace[first:stop], strict=True))))
        parts *= 2
    return found


def balanced_owners(present: ExpertMap, totals: Sequence[int]) -> ExpertMap:
    """Owners by which the largest load is small: the experts with most rows first, each to the rank
    with fewest that owns less than its number; then pairs change places as long as the loads get
    more even. Ranks keep as many of their present experts as the same parts allow.
    """
    ranks, each = present.ranks, present.experts // present.ranks
    parts: list[list[int]] = [[] for _ in range(ranks)]
    rows = [0] * ranks
    for expert in sorted(range(present.experts), key=lambda e: (-totals[e], e)):
        part = min((p for p in range(ranks) if len(parts[p]) < each), key=lambda p: rows[p])
        parts[part].append(expert)
        rows[part] += totals[expert]
    while _exchange(parts, rows, totals):
        pass
    owners = [0] * present.experts
    for rank, part in _kept(present, parts).items():
        for expert in parts[part]:
            owners[expert] = rank
    return ExpertMap(tuple(owners), ((),) * ranks, present.slots)


def _exchange(parts: list[list[int]], rows: list[int], totals: Sequence[int]) -> bool:
    """Let an expert of the part with most rows and one of another change places, so that the larger
    of both gets smallest; false if no pair makes it smaller."""
    most = rows.index(max(rows))
    best, pair = rows[most], None
    for part, others in enumerate(parts):
        for i, mine in enumerate(parts[most]):
            for j, other in enumerate(others):
                less = totals[mine] - totals[other]
                larger = max(rows[most] - less, rows[part] + less)
                if part != most and larger < best:
                    best, pair = larger, (part, i, j, less)
    if pair is None:
        return False
    part, i, j, less = pair
    parts[most][i], parts[part][j] = parts[part][j], parts[most][i]
    rows[most] -= less
    rows[part] += less
    return True


def _kept(present: ExpertMap, parts: Sequence[Sequence[int]]) -> dict[int, int]:
    """The part of each rank: pairs with the most experts that stay come first."""
    ranks = range(present.ranks)
    stay = {
        (rank, part): sum(present.owners[e] == rank for e in parts[part])
        for rank in ranks
        for part in ranks
    }
    found: dict[int, int] = {}
    for rank, part in sorted(stay, key=lambda pair: (-stay[pair], pair)):
        if rank not in found and part not in found.values():
            found[rank] = part
    return found
