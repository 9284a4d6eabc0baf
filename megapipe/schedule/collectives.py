"""When a stage's parameters are gathered and its gradients reduced, over its data-parallel peers.

Every rank has one lane for both, beside computation and beside messages, with one of them at a
time. The gathers come first: from the beginning of the step, in the order in which the rank uses
its stages; the first operation of a stage waits for its own, and each copy of a stage is gathered
by itself. A reduction is ready when the last gradient of the step is in; that of a stage with
several holders when all of them are through with their lists, for only then do they agree on what
comes next. Those that are ready go in that order, and all holders take part from start to end. No
gather is in the way, as each micro-batch has been forward through all stages before. There is one
reduction and one gather per stage and step, as for ZeRO-0 and 1.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import KIND_MASK, STAGE_MASK, STAGE_SHIFT, Kind, Schedule


class Interval(NamedTuple):
    """When a rank gathers or reduces one of its stages."""

    stage: int
    rank: int
    start: Time
    end: Time


def gathers(schedule: Schedule, cost: Cost) -> tuple[Interval, ...]:
    """The gathers of all ranks, by rank and start; those that take no time are left out."""
    times = cost.per_stage("gather", schedule.placement.stages)
    if not any(times):
        return ()
    found = []
    for rank, ops in enumerate(schedule.ops):
        now: Time = 0
        for stage in first_uses(ops):
            if times[stage]:
                found.append(Interval(stage, rank, now, now + times[stage]))
                now += times[stage]
    return tuple(found)


def reductions(
    schedule: Schedule, cost: Cost, ends: Sequence[Sequence[Time]]
) -> tuple[Interval, ...]:
    """The reductions of all ranks, by start; those that take no time are left out.

    `ends` has, per rank, when its operations end.
    """
    times = cost.per_stage("reduce", schedule.placement.stages)
    if not any(times):
        return ()
    ready: dict[int, Time] = {}
    for ops, ended in zip(schedule.ops, ends, strict=True):
        for stage, index in _last_gradients(ops).items():
            ready[stage] = max(ready.get(stage, 0), ended[index])
    for stage in ready:
        holders = schedule.placement.holders(stage)
        if len(holders) > 1:
            ready[stage] = max(ends[rank][-1] for rank in holders if ends[rank])
    free: dict[int, Time] = {}
    found = []
    for stage in sorted(ready, key=lambda stage: (ready[stage], stage)):
        if not times[stage]:
            continue
        holders = schedule.placement.holders(stage)
        start = max(ready[stage], *(free.get(rank, 0) for rank in holders))
        for rank in holders:
            free[rank] = start + times[stage]
            found.append(Interval(stage, rank, start, free[rank]))
    return tuple(sorted(found, key=lambda each: each.start))


def first_uses(ops: Sequence[int]) -> dict[int, int]:
    """The index of each stage's first operation in a rank's list, in that order."""
    found: dict[int, int] = {}
    for index, code in enumerate(ops):
        found.setdefault(code >> STAGE_SHIFT & STAGE_MASK, index)
    return found


def _last_gradients(ops: Sequence[int]) -> dict[int, int]:
    """The index of each stage's last operation that adds to its gradients."""
    return {
        code >> STAGE_SHIFT & STAGE_MASK: index
        for index, code in enumerate(ops)
        if code & KIND_MASK in (Kind.B, Kind.W)
    }
