"""Times of one schedule's operations and messages, in whole ticks."""

import random
from array import array
from collections.abc import Sequence
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
from megapipe.schedule.dependencies import LOW, PIECE_SHIFT, PIECES, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_SHIFT, WORK, Kind
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.ticks import Numbers, Wide, per_unit, room, whole, width


class OpTimes:
    """Times by low part (see Dependencies) and by stage.

    They are floats in the unit of the costs if one of these is a float or there is jitter, and
    whole numbers of ticks otherwise.
    """

    def __init__(
        self, dependencies: Dependencies, cost: Cost, policy: ReplicaPolicy = REPLICAS
    ) -> None:
        policy.check()
        self.dependencies, self.cost, self.policy = dependencies, cost, policy
        schedule = dependencies.schedule
        if cost.slices is not None and len(cost.slices) != schedule.slices:
            raise ScheduleError(
                f"cost slices: {len(cost.slices)} shares for {schedule.slices} slices; "
                "give one per slice"
            )
        self.length: list[Time] = []
        """The time of an operation; of one on the uncut sequence if the costs have `slices`."""
        self.lag: list[Time] = []
        """The time of its input's message; 0 unless messages overlap with computation."""
        self.hold: list[Time] = []
        """The time of its output's message, for which the rank waits; 0 if messages overlap."""
        self._read(cost.table(dependencies.stages))
        self.gather = list(cost.per_stage("gather", dependencies.stages))
        self.reduce = list(cost.per_stage("reduce", dependencies.stages))
        self.buckets = cost.buckets_of(dependencies.stages)
        self.per_unit = 1
        """Ticks in a unit of time."""
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
        """Fill `length`, `lag` and `hold`."""
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
        """More ticks than the schedule takes: those of everything in it, one after the other."""
        cost = self.cost
        each = 2 * max(self.length) * max(1, *(cost.slices or ()), cost.overlap_factor)
        each += max(self.lag) + max(self.hold)
        each += (2 + self.policy.prefetch) * max(self.gather) + max(self.reduce)
        return int(each * sum(map(len, self.dependencies.schedule.ops))) + 1

    def many(self, value: int, count: int) -> list[Time]:
        """`count` equal times."""
        return room(value, count, self._longest)

    @cached_property
    def width(self) -> int:
        """Limbs of a time; 1 where it is a number of 64 bits, whole or float."""
        return 1 if isinstance(self._longest, float) else width(self._longest)

    def kept(self) -> list[Time]:
        """No times yet; packed."""
        return self.many(0, 0) if self.width == 1 else cast("list[Time]", Wide(self.width))

    def numbers(self, times: Sequence[Time]) -> Numbers:
        """Times as an array."""
        if self.width > 1:
            return Wide(self.width, cast("Sequence[int]", times)).rows
        return np.array(times, np.int64 if self.exact else np.float64)

    def together(self, first: Time, second: Time) -> Time:
        """The time of two joined operations that take these times alone."""
        return plain((first + second) * self.cost.overlap_factor)

    def by_operation(self, rank: int, codes: "array[int]") -> list[Time] | None:
        """The time of each operation of a rank's list; None where `length` has them."""
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
                time = plain(time * cost.slices[(code >> PIECE_SHIFT & PIECES) % schedule.slices])
            if cost.jitter:
                time = float(time) * (1 + cost.jitter * rolls.uniform(-1, 1))
            result.append(time)
        return result


def in_ticks(placement: Placement, cost: Cost) -> tuple[Cost, int]:
    """The costs of whole micro-batches on a placement in ticks, and the ticks in a unit of time.

    Costs with a float among them are returned as they are, with 1.
    """
    stages, home = placement.stages, placement.table[0]
    names = (*(kind.name for kind in WORK), "update")
    rows = dict(zip(names, cost.table(stages), strict=True))
    pairs = [pair for pair in pairwise(home) if pair[0] != pair[1]]
    links = {pair: cost.link(*pair) for a, b in pairs for pair in ((a, b), (b, a))}
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
