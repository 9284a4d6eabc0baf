"""Times of one schedule's operations, messages and collectives, in whole ticks."""

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, repeat
from math import inf
from typing import Any, cast

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time, plain
from megapipe.schedule.data_parallel import REPLICAS, ReplicaPolicy
from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_SHIFT, WORK, Kind
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.ticks import Numbers, Wide, per_unit, room, whole, width


class OpTimes:
    """Times of operations and their messages, by low bits of the code (see Dependencies), and times
    of gathers and reductions, by stage.

    The times are floats in the unit of the costs if a cost is a float or there is jitter, and whole
    numbers of ticks otherwise.
    """

    def __init__(
        self, dependencies: Dependencies, cost: Cost, policy: ReplicaPolicy = REPLICAS
    ) -> None:
        policy.check()
        check_spanning(dependencies.schedule.placement, cost)
        self.dependencies, self.cost, self.policy = dependencies, cost, policy
        schedule = dependencies.schedule
        if cost.slices is not None and len(cost.slices) != schedule.slices:
            raise ScheduleError(
                f"cost slices: {len(cost.slices)} shares for {schedule.slices} slices; "
                "give one per slice"
            )
        self.length: list[Time] = []
        """Time of an operation; if the costs have `slices`, for the whole sequence."""
        self.lag: list[Time] = []
        """Time that an operation's input is in flight; 0 unless messages overlap with
        computation."""
        self.hold: list[Time] = []
        """Time that the rank waits for an operation's output to be sent; 0 if messages overlap."""
        self._read(cost.table(dependencies.stages))
        self.gather = list(cost.per_stage("gather", dependencies.stages))
        self.reduce = list(cost.per_stage("reduce", dependencies.stages))
        self.buckets = cost.buckets_of(dependencies.stages)
        self.per_unit = 1
        """Number of ticks in a unit of time."""
        columns = (self.length, self.lag, self.hold, self.gather, self.reduce)
        given = [time for column in columns for time in column]
        factors = [*(cost.slices or ()), cost.overlap_factor]
        leaving = {number for own in cost.buckets for bucket in own for number in bucket}
        floating = any(isinstance(number, float) for number in (*given, *factors, *leaving))
        self.exact = not (cost.jitter or floating)
        if self.exact:
            self.per_unit = per_unit(given) * per_unit(cost.slices or ()) * per_unit(factors[-1:])
            self.per_unit *= per_unit(leaving)
        for column in columns:
            column[:] = (
                whole(time, self.per_unit) if self.exact else float(time) for time in column
            )
        self._longest = self._serial() if self.exact else inf

    def _read(self, table: tuple[tuple[Time, ...], ...]) -> None:
        """Fill `length`, `lag` and `hold`. `table`: times by kind and stage."""
        dependencies, cost = self.dependencies, self.cost
        part = Fraction(1, dependencies.schedule.slices)
        for low, kind, flow, stage in dependencies.by_low():
            for column in (self.length, self.lag, self.hold):
                column.extend(repeat(0, low + 1 - len(column)))
            if kind == Kind.U:
                gather = cost.per_stage("gather", dependencies.stages)[stage]
                self.length[low] = plain(table[kind][stage] + gather)
                self.lag[low] = cost.per_stage("reduce", dependencies.stages)[stage]
                continue
            share = flow.size if cost.slices else flow.size * part
            self.length[low] = _share(table[kind][stage], share)
            came, goes = dependencies.incoming[low], dependencies.outgoing[low]
            if came and cost.overlap:
                self.lag[low] = plain(cost.link(*came, flow.size * part))
            if goes and not cost.overlap:
                self.hold[low] = plain(cost.link(*goes, flow.size * part))

    def _serial(self) -> int:
        """Return an upper bound of the makespan in ticks: more than the sum of all times."""
        cost = self.cost
        each = 2 * max(self.length) * max(1, *(cost.slices or ()), cost.overlap_factor)
        each += max(self.lag) + max(self.hold)
        each += (2 + self.policy.prefetch) * max(self.gather) + max(self.reduce)
        return int(each * sum(map(len, self.dependencies.schedule.ops))) + 1

    def many(self, value: int, count: int) -> list[Time]:
        """Return a list of `count` times, all `value`."""
        return room(value, count, self._longest)

    @cached_property
    def width(self) -> int:
        """Number of limbs of a time; 1 if it is a 64-bit number, whole or float."""
        return 1 if isinstance(self._longest, float) else width(self._longest)

    def kept(self) -> list[Time]:
        """Return an empty packed list for times."""
        return self.many(0, 0) if self.width == 1 else cast("list[Time]", Wide(self.width))

    def numbers(self, times: Sequence[Time]) -> Numbers:
        """Return times as an array."""
        if self.width > 1:
            return Wide(self.width, cast("Sequence[int]", times)).rows
        return np.array(times, np.int64 if self.exact else np.float64)

    def together(self, first: Time, second: Time) -> Time:
        """Return the time of a joined pair whose operations alone take `first` and `second`."""
        return plain((first + second) * self.cost.overlap_factor)

    def by_operation(self, rank: int, codes: "array[int]") -> list[Time] | None:
        """Return the time of each operation of a rank's list; None if all times are in `length`."""
        cost, schedule = self.cost, self.dependencies.schedule
        if not (schedule.recompute or cost.slices or cost.jitter):
            return None
        ahead = {(code & ~JOINED) >> STAGE_SHIFT for code in codes if code & KIND_MASK == Kind.R}
        rolls = random.Random(f"{cost.seed} {rank}")
        result = []
        for code in codes:
            low = code & LOW
            time = self.length[low]
            stage = (low >> STAGE_SHIFT) % self.dependencies.stages
            if (
                stage in schedule.recompute
                and code & KIND_MASK in (Kind.I, Kind.B)
                and (code & ~JOINED) >> STAGE_SHIFT not in ahead
            ):
                time += self.length[low - low % (1 << STAGE_SHIFT) + Kind.R]
            if cost.slices:
                time = plain(
                    time * cost.slices[(code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK) % schedule.slices]
                )
            if cost.jitter:
                time = float(time) * (1 + cost.jitter * rolls.uniform(-1, 1))
            result.append(time)
        return result


def check_spanning(placement: Placement, cost: Cost) -> None:
    """Check that costs can be used on a placement, if it has spanning stages.

    Raises:
        ScheduleError: links of unequal speed, gathers or reductions.
    """
    if not placement.spanning:
        return
    for present, what in (
        (isinstance(cost.latency, Mapping) or isinstance(cost.bandwidth, Mapping), "unequal links"),
        (cost.has_replicas(placement.stages), "gathers and reductions"),
    ):
        if present:
            raise ScheduleError(
                f"cost: {what} cannot be simulated if a stage ({min(placement.spanning)}) spans "
                "all ranks"
            )


def in_ticks(placement: Placement, cost: Cost) -> tuple[Cost, int]:
    """Convert costs of whole micro-batches on a placement to ticks; return them and the number of
    ticks per unit of time.

    If one of the costs is a float, return all costs unchanged, and 1.
    """
    stages = placement.stages
    names = (*(kind.name for kind in WORK), "update")
    rows = dict(zip(names, cost.table(stages), strict=True))
    near = [*pairwise(range(stages)), *pairwise(reversed(range(stages)))]
    links = {pair: cost.link(*pair) for two in near for pair in placement.messages(*two)}
    rows |= {"reduce": cost.per_stage("reduce", stages), "gather": cost.per_stage("gather", stages)}
    every = [time for row in (*rows.values(), links.values()) for time in row]
    if any(isinstance(time, float) for time in every):
        return cost, 1
    ticks = per_unit(every)
    times: dict[str, Any] = {
        name: tuple(whole(time, ticks) for time in row) for name, row in rows.items()
    }
    latency = {pair: whole(time, ticks) for pair, time in links.items()}
    return replace(cost, **times, latency=latency, bandwidth=None), ticks


def _share(time: Time, share: Fraction) -> Time:
    if share == 1:
        return time
    return time * float(share) if isinstance(time, float) else plain(time * share)
