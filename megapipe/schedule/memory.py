"""Activations that a schedule keeps, and messages that it sends, counted from its lists.

The unit is *micro-batches of a full rank*: activations of a whole micro-batch in 1 / ranks of the
model. So a whole micro-batch at a stage counts as the stage's share
(:attr:`.Placement.stage_shares`). There are two accountings, and published tables mix them:

- *held*: a whole activation counts from F to W (or B), as saved tensors are kept until W;
- *weighted*: I frees a share of an activation, W the rest (as in 2401.10241).

At a stage that recomputes, activations count from R (or from I or B without R); the input that is
kept from F on does not count.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Time, plain
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.ir import KIND_MASK, Kind, Schedule
from megapipe.schedule.timing.simulate import Timeline
from megapipe.schedule.timing.ticks import per_unit, whole

Amount = int | Fraction
"""Amount of activations. 1: a whole micro-batch in 1 / ranks of the model (a full rank)."""


_HELD_BY_KIND = np.array([{Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(kind, 0) for kind in Kind])
"""Number of activations that an operation adds to those on its rank, by kind."""


class _Change(NamedTuple):
    """Change of a rank's activations at the start and at the end of one operation, in grains (the
    unit of :class:`_Grains`)."""

    start: int
    end: int


def most_held(ops: Sequence[int]) -> int:
    """Return the maximum number of activations alive at once in a list of packed operations. Each
    stage and work item has one activation, alive from F to W or B."""
    kinds = np.array(ops, np.int64) & KIND_MASK
    return int(_HELD_BY_KIND[kinds].cumsum().max(initial=0))


def peak_held(schedule: Schedule) -> tuple[Amount, ...]:
    """Return the peak activations of each rank, if they are held from F to W (or B)."""
    return peak_weighted(schedule, freed=Fraction(0))


def peak_weighted(schedule: Schedule, freed: Fraction) -> tuple[Amount, ...]:
    """Return the peak activations of each rank, if I frees the share `freed` and W the rest.

    Raises:
        ScheduleError: `freed` is not from 0 to 1.
    """
    grains = _Grains(schedule, freed)
    return tuple(grains.amount(grains.peak(rank)) for rank in range(len(schedule.ops)))


def curve(
    timeline: Timeline, rank: int, freed: Fraction = Fraction(0)
) -> list[tuple[Time, Amount]]:
    """Return a rank's activations over time as (time, amount from then on), if I frees the share
    `freed` and W the rest."""
    grains = _Grains(timeline.schedule, freed)
    events: dict[Time, int] = {}
    for start, end, change in zip(
        timeline.start_ticks[rank], timeline.end_ticks[rank], grains.changes(rank), strict=True
    ):
        events[start] = events.get(start, 0) + change.start
        events[end] = events.get(end, 0) + change.end
    times = sorted(events)
    return [
        (timeline.time(time), grains.amount(alive))
        for time, alive in zip(times, accumulate(events[time] for time in times), strict=True)
    ]


def messages(schedule: Schedule) -> int:
    """Count the messages of a step between different ranks."""
    return int(sum(traffic(schedule).values(), start=Fraction(0)))


def traffic(schedule: Schedule) -> dict[tuple[int, int], Fraction | int]:
    """Count the messages of a step by (source, destination)."""
    return _per_link(schedule, lambda size: 1)


def volume(schedule: Schedule) -> dict[tuple[int, int], Fraction | int]:
    """Return the volume sent per step by (source, destination); a whole micro-batch counts 1."""
    return _per_link(schedule, lambda size: size / schedule.slices)


def _per_link(
    schedule: Schedule, of: Callable[[Fraction], Amount]
) -> dict[tuple[int, int], Amount]:
    dependencies = Dependencies(schedule)
    directions = 1 if schedule.forward_only else 2
    result: dict[tuple[int, int], Amount] = {}
    counts = (
        [schedule.microbatches]
        if len(dependencies.flows) == 1
        else [dependencies.flow_of.count(index) for index in range(len(dependencies.flows))]
    )
    for flow, count in zip(dependencies.flows, counts, strict=True):
        sent = count * schedule.slices * of(flow.size)
        for stages in pairwise(range(schedule.placement.stages)):
            for source, target in (stages, stages[::-1])[:directions]:
                for link in schedule.placement.messages(source, target, flow.direction):
                    result[link] = _whole(result.get(link, 0) + sent)
    return dict(sorted(result.items()))


def weight_replicas(schedule: Schedule) -> tuple[Amount, ...]:
    """Return the size of each rank's weights, replicas included, in 1 / ranks of the model."""
    placement = schedule.placement
    shares = placement.stage_shares
    return tuple(
        _whole(sum((shares[stage] for stage in placement.stages_of(rank)), start=Fraction(0)))
        for rank in range(placement.ranks)
    )


class _Grains:
    """Activations counted in *grains*, so small that no operation adds or frees a part of one."""

    def __init__(self, schedule: Schedule, freed: Fraction) -> None:
        if not 0 <= freed <= 1:
            raise ScheduleError(f"the share freed by I must be from 0 to 1, not {freed}")
        self._schedule = schedule
        shares = schedule.placement.stage_shares
        parts = per_unit(shares)
        self._weights = [whole(share, parts) for share in shares]
        """Number of units in the activation of one slice at each stage. A larger micro-batch has
        larger units (`_units`)."""
        units = [size / (parts * schedule.slices) for size in schedule.sizes or [Fraction(1)]]
        self._per_rank = per_unit((*units, *(unit * freed for unit in units)))
        """Number of grains in a whole micro-batch of a full rank."""
        self._units = [whole(unit, self._per_rank) for unit in units]
        """Number of grains in a unit, for each micro-batch; one number if none is split."""
        self._freed = [whole(unit * freed, self._per_rank) for unit in units]
        """Number of grains that I frees per unit, in the same order as `_units`."""

    def amount(self, grains: int) -> Amount:
        """Convert grains to micro-batches of a full rank."""
        return _whole(Fraction(grains, self._per_rank))

    def peak(self, rank: int) -> int:
        """Return the peak of activations on a rank, in grains."""
        schedule = self._schedule
        if schedule.sizes or schedule.recompute or len(set(self._weights)) > 1:
            alive = peak = 0
            for change in self.changes(rank):
                peak = max(peak, alive + change.start)
                alive += change.start + change.end
            return peak
        # what an operation adds depends on its kind alone, and none both adds and frees
        unit, freed = (each[0] * self._weights[0] for each in (self._units, self._freed))
        adds = {Kind.F: unit, Kind.B: -unit, Kind.I: -freed, Kind.W: freed - unit}
        if schedule.forward_only:
            return 0
        ops = schedule.ops[rank]
        fits = unit * len(ops) < 1 << 63
        by_kind = np.array([adds.get(kind, 0) for kind in Kind], np.int64 if fits else object)
        kinds = np.array(ops, np.int64) & KIND_MASK
        return int(by_kind[kinds].cumsum().max(initial=0))

    def changes(self, rank: int) -> Iterator[_Change]:
        """Yield the change of activations by each operation of a rank, in order."""
        schedule = self._schedule
        ops = schedule.rank_ops(rank)
        ahead = {(op.stage, op.microbatch) for op in ops if op.kind == Kind.R}
        for op in ops:
            which = op.microbatch if schedule.sizes else 0
            weight = self._weights[op.stage]
            unit, freed = self._units[which] * weight, self._freed[which] * weight
            late = op.stage in schedule.recompute
            if op.kind == Kind.F:
                yield _Change(0 if late or schedule.forward_only else unit, 0)
            elif op.kind == Kind.R:
                yield _Change(unit, 0)
            elif op.kind == Kind.W:
                yield _Change(0, freed - unit)
            elif op.kind == Kind.U:
                yield _Change(0, 0)
            else:
                begins = late and (op.stage, op.microbatch) not in ahead
                yield _Change(unit if begins else 0, -unit if op.kind == Kind.B else -freed)


def _whole(amount: Amount) -> Amount:
    """Return an amount, as an int if it is whole."""
    result = plain(amount)
    assert not isinstance(result, float)
    return result
