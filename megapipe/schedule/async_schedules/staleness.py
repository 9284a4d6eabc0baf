"""Staleness of weights in a no-flush schedule, and number of weight versions that ranks keep."""

from collections import defaultdict
from fractions import Fraction
from typing import NamedTuple

from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.proof.updates import weights_kept


class Staleness(NamedTuple):
    """Staleness of a stage: the number of updates by which the version that a forward reads is
    behind the version that its window's update changes. Prediction is not counted."""

    least: int
    mean: Fraction
    most: int
    kept: int
    """Maximum number of versions and predictions of the stage's weights that a rank keeps."""


def staleness(schedule: Schedule) -> tuple[Staleness, ...]:
    """Return the staleness of each stage in the last update window of a valid no-flush schedule. It
    is the steady state if enough windows come before."""
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
