"""How stale the weights of a schedule with updates are, and how many of them are kept."""

from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.proof.updates import weights_kept


class Staleness(NamedTuple):
    """By how many updates the weights that the forwards of a stage read are behind those that
    their own window changes. What is predicted ahead does not count."""

    least: int
    mean: Fraction
    most: int
    kept: int
    """The most weights of the stage that its rank keeps at once."""


def staleness(schedule: Schedule) -> tuple[Staleness, ...]:
    """The staleness of each stage in a valid schedule with updates: that of its last window, where
    it is steady if there are enough windows before."""
    updates = schedule.updates
    assert updates is not None
    last = schedule.microbatches // updates.window - 1
    behind: defaultdict[int, list[int]] = defaultdict(list)
    kept: defaultdict[int, int] = defaultdict(int)
    for rank, reads in enumerate(updates.reads):
        ops = schedule.rank_ops(rank)
        for op, read, count in zip(ops, reads, weights_kept(ops, reads), strict=True):
            kept[op.stage] = max(kept[op.stage], count)
            if op.kind == Kind.F and op.microbatch // updates.window == last:
                behind[op.stage].append(last - read.version)
    return tuple(
        Staleness(
            min(behind[stage]),
            Fraction(sum(behind[stage]), len(behind[stage])),
            max(behind[stage]),
            kept[stage],
        )
        for stage in range(schedule.placement.stages)
    )
