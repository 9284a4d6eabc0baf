"""Expert pools: owner maps that are found before a run, from the row counts of another run. At each
rebalancing, a layer uses the best map of its pool (SmartMoE, Zhai et al., ATC 2023).

To find good owners takes long, and a model's load patterns recur. So the search is done once, and a
run only compares the few maps of its pool. The maps of a pool have no replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megapipe.experts.map import ExpertMap

Trace = Sequence[Sequence[int]]
"""Number of rows of each expert, for each step."""

MOST_PARTS = 64


def largest_load(of: ExpertMap, totals: Sequence[int]) -> int:
    """Return the number of rows of the busiest rank if each expert is computed by its owner."""
    rows = [0] * of.ranks
    for owner, own in zip(of.owners, totals, strict=True):
        rows[owner] += own
    return max(rows)


def moves(before: ExpertMap, after: ExpertMap) -> int:
    """Return the maximum number of experts that a rank gets if `before` is replaced by `after`."""
    came = [a for b, a in zip(before.owners, after.owners, strict=True) if a != b]
    return max(map(came.count, came), default=0)


def migrate(
    present: ExpertMap, pool: Sequence[ExpertMap], totals: Sequence[int], worth: float = 0.0
) -> ExpertMap:
    """Return the cheapest map among `present` and `pool`; of equally cheap maps the first one. The
    cost of a map is its largest load in rows, plus `worth` rows times the maximum number of experts
    that a rank gets from other ranks. `totals`: number of rows of each expert."""
    maps = (present, *pool)
    loads = [largest_load(each, totals) for each in maps]
    return maps[_cheapest(loads, [moves(present, each) for each in maps], worth)]


def _cheapest(loads: Sequence[int], moved: Sequence[int], worth: float) -> int:
    prices = [load + worth * each for load, each in zip(loads, moved, strict=True)]
    return prices.index(min(prices))


def find_pool(present: ExpertMap, trace: Trace, size: int, worth: float = 0.0) -> list[ExpertMap]:
    """Find at most `size` maps for :func:`migrate`, for a run that begins with `present`.

    Candidates balance the row sums of the whole trace, of its halves, quarters and so on. To rate a
    pool, the trace is replayed: a step uses the map chosen for the counts of the previous step. The
    largest loads of all steps are summed, and a moved expert adds `worth` rows. The pool grows by
    the best candidate while the sum shrinks.
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
    """Replays of a trace with subsets of `maps`. Every replay begins with the first map."""

    def __init__(self, maps: list[ExpertMap], trace: Trace, worth: float) -> None:
        self.maps = maps
        self._worth = worth
        self._loads = [[largest_load(each, totals) for totals in trace] for each in maps]
        self._moves = [[moves(each, other) for other in maps] for each in maps]

    def rows(self, pool: Sequence[int]) -> float:
        """Return the sum of the largest loads of all steps, plus the price of moves."""
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
    """Sum the rows of each expert over the whole trace, over its halves, its quarters and so on."""
    found, parts = [], 1
    while parts <= min(len(trace), MOST_PARTS):
        ends = [len(trace) * i // parts for i in range(parts + 1)]
        for first, stop in pairwise(ends):
            found.append(list(map(sum, zip(*trace[first:stop], strict=True))))
        parts *= 2
    return found


def balanced_owners(present: ExpertMap, totals: Sequence[int]) -> ExpertMap:
    """Find owners with a small largest load. First, experts are dealt into one part per rank, in
    descending order of rows: each into the part with the fewest rows, among parts that are not
    full. Then pairs of experts are swapped while the largest load shrinks. Finally, parts are
    assigned to ranks so that few experts move."""
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
    """Swap an expert of the busiest part with one of another part, so that the larger of the two
    loads becomes as small as possible. Return False if no swap lowers it."""
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
    """Assign parts to ranks greedily: the (rank, part) pair that moves the fewest experts first."""
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
