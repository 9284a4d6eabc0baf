"""Checks of unequal devices and links (``plan.rank_speeds``, ``plan.links``), and the order of
pipeline ranks that avoids slow links (``pipeline.rank_order``), as in Pipe-Torch.

A pipeline rank is the group of processes with one pipeline index. A link between two pipeline ranks
is as fast as that of their slowest pair.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.p2p import speed_between
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement

MOST_PERMUTED = 7
"""Maximum number of ranks of which every order is tried; of more, ranks are swapped."""
MOST_SHUFFLED, RESTARTS = 16, 20
"""Maximum number of ranks whose swaps also begin with shuffled orders, and the number of these."""


def check_unequal(config: Config, processes: int) -> None:
    """Refuse unequal devices and links that do not fit the number of processes.

    Raises:
        ConfigError: the text names the key.
    """
    speeds = config.plan.rank_speeds
    if speeds is not None and len(speeds) != processes:
        raise ConfigError(
            f"plan.rank_speeds has {len(speeds)} values: expected one for each of {processes} "
            "processes"
        )
    for name in config.plan.links:
        ends = re.fullmatch(r"(\d+)-(\d+)", name)
        if ends is None or ends[1] == ends[2] or max(map(int, ends.groups())) >= processes:
            raise ConfigError(
                f"plan.links.{name}: expected two different ranks below {processes}, as in 0-1"
            )
    order, pipeline = config.pipeline.rank_order, config.pipeline
    if order is None:
        return
    if pipeline.schedule == "auto" or pipeline.weight_versions != "synchronous":
        raise ConfigError(
            "pipeline.rank_order needs pipeline.weight_versions=synchronous, and another "
            "pipeline.schedule than auto"
        )
    if order != "auto" and sorted(order) != list(range(config.parallel.pp)):
        raise ConfigError(
            f"pipeline.rank_order={order}: expected each of the pipeline ranks 0 to "
            f"{config.parallel.pp - 1} once"
        )


def in_order(config: Config, schedule: Schedule) -> Schedule:
    """Return the schedule on pipeline ranks in the order of ``pipeline.rank_order``."""
    order = config.pipeline.rank_order
    if order is None:
        return schedule
    if order != "auto":
        return reordered(schedule, order)
    found = fastest_order(schedule.placement, lambda a, b: 1 / speed_between(config, a, b))
    return reordered(schedule, found)


def reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Move what rank i of a schedule does to rank order[i]."""
    placement = schedule.placement
    if list(order) == list(range(placement.ranks)):
        return schedule
    ops = [array("q")] * placement.ranks
    bounds = [0] * placement.ranks
    for rank, at in enumerate(order):
        ops[at] = schedule.ops[rank]
        bounds[at] = schedule.activation_bound[rank] if schedule.activation_bound else 0
    table = tuple(tuple(order[rank] for rank in row) for row in placement.table)
    return replace(
        schedule,
        placement=Placement(placement.ranks, table),
        ops=tuple(ops),
        activation_bound=tuple(bounds) if schedule.activation_bound else None,
    )


def fastest_order(placement: Placement, time: Callable[[int, int], float]) -> Sequence[int]:
    """Return the order of ranks whose slowest link between neighbouring stages takes least time,
    and in a tie all links together.

    Args:
        placement: stages on ranks in the order 0, 1, ...
        time: function that returns the time of a message between two ranks.
    """
    used = {
        frozenset(pair) for row in placement.table for pair in pairwise(row) if len({*pair}) == 2
    }
    links = sorted(tuple(sorted(pair)) for pair in used)
    ranks = range(placement.ranks)
    table = [[0.0 if a == b else time(a, b) for b in ranks] for a in ranks]

    def cost(order: Sequence[int]) -> tuple[float, float]:
        times = [table[order[a]][order[b]] for a, b in links]
        return max(times, default=0.0), sum(times)

    if placement.ranks <= MOST_PERMUTED:
        return min(permutations(ranks), key=cost)
    random = Random(0)
    restarts = RESTARTS if placement.ranks <= MOST_SHUFFLED else 0
    starts = [list(ranks), *(random.sample(ranks, placement.ranks) for _ in range(restarts))]
    return min((_swapped(start, cost) for start in starts), key=cost)


def _swapped(
    order: Sequence[int], cost: Callable[[Sequence[int]], tuple[float, float]]
) -> Sequence[int]:
    """Swap two ranks while that improves the order."""
    best, improved = cost(order), True
    while improved:
        improved = False
        for other in _swaps(order):
            if (found := cost(other)) < best:
                order, best, improved = other, found, True
                break
    return order


def _swaps(order: Sequence[int]) -> Iterable[Sequence[int]]:
    for i, j in combinations(range(len(order)), 2):
        other = list(order)
        other[i], other[j] = other[j], other[i]
        yield other
