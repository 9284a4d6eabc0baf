"""When each operation runs, given what it costs.

Every rank runs its list in order and starts an operation as soon as the one before it has ended
and its input has arrived, so each start is the longest path to it: one pass, no event queue.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import repeat
from typing import cast

from megapipe.errors import ScheduleError
from megapipe.schedule.collectives import Interval, complete, make_lanes
from megapipe.schedule.cost import Cost, Time, plain, ratio
from megapipe.schedule.edges import LOW, UNIT_SHIFT, UNITS, Edges
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_SHIFT, Kind, Schedule


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. Times are exact where the costs are whole numbers or fractions."""

    schedule: Schedule
    starts: tuple[Sequence[Time], ...]
    """starts[rank][n] is the start of operation n of the rank; the step begins at 0. Two joined
    operations start and end together."""
    ends: tuple[Sequence[Time], ...]
    cost: Cost
    gathers: tuple[Interval, ...] = ()
    """When parameters are gathered, by rank and start; none where that takes no time."""
    reductions: tuple[Interval, ...] = ()
    """When gradients are reduced, by start, on each holder of a stage; likewise."""

    @cached_property
    def begin(self) -> Time:
        """The first start of all, of operations and gathers."""
        first = min(starts[0] for starts in self.starts if starts)
        return min(first, *(each.start for each in self.gathers)) if self.gathers else first

    @cached_property
    def finish(self) -> Time:
        """The last end of all, of operations and reductions."""
        last = max(ends[-1] for ends in self.ends if ends)
        return max(last, *(each.end for each in self.reductions)) if self.reductions else last

    @property
    def makespan(self) -> Time:
        """From the first start to the last end over all ranks, with gathers and reductions."""
        return self.finish - self.begin

    @property
    def exposed_gather(self) -> Time:
        """What of the makespan is before the first operation of all: gathers alone."""
        return min(starts[0] for starts in self.starts if starts) - self.begin

    @property
    def exposed_reduce(self) -> Time:
        """What of the makespan is after the last operation of all: reductions alone."""
        return self.finish - max(ends[-1] for ends in self.ends if ends)

    @cached_property
    def spans(self) -> tuple[Time, ...]:
        """Per rank, from the start of its first operation to the end of its last, so without what
        it gathers before and reduces after; 0 where it does nothing."""
        return tuple(
            ends[-1] - starts[0] if ends else 0
            for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """Per rank, the time it computes."""
        return tuple(
            sum(ends) - sum(starts) - sum(end - start for start, end, _ in self._twice(rank))
            for rank, (starts, ends) in enumerate(zip(self.starts, self.ends, strict=True))
        )

    def _twice(self, rank: int) -> list[tuple[Time, Time, int]]:
        """The times of operations that are joined with their next, so stand twice."""
        codes = self.schedule.ops[rank]
        if not codes or max(codes) < JOINED:
            return []
        both = zip(self.starts[rank], self.ends[rank], codes, strict=True)
        return [entry for entry in both if entry[2] >= JOINED]

    @property
    def bubble_makespan(self) -> Time:
        """Share of the makespan without computation, over all ranks."""
        return 1 - ratio(sum(self.busy), len(self.busy) * self.makespan)

    @property
    def bubble_ideal(self) -> Time:
        """Time within the makespan without computation, relative to the time computed, over all
        ranks."""
        return ratio(len(self.busy) * self.makespan, sum(self.busy)) - 1

    @property
    def bubble_span(self) -> Time:
        """Idle share of the longest span, over all ranks: the bubble of 2401.10241, which is
        real only if a rank may begin its next step before the others have ended this one."""
        return 1 - ratio(sum(self.busy), len(self.busy) * max(self.spans))


def simulate(schedule: Schedule, cost: Cost | None = None) -> Timeline:
    """Time a valid schedule; the default cost is F = I = W = 1, B = 2, R = 1, no latency, and
    nothing to gather or reduce (see :mod:`megapipe.schedule.collectives`).

    Raises:
        ScheduleError: a cost that does not fit the stages, or a schedule that deadlocks
            (:func:`~megapipe.schedule.validate.validate` says where).
    """
    cost = cost or Cost()
    edges = Edges(schedule)
    lists = [edges.tokens(rank) for rank in range(schedule.placement.ranks)]
    times = Times(edges, cost)
    beside = make_lanes(schedule, cost)
    lag, hold, factor = times.lag, times.hold, cost.overlap_factor
    need_base, make_base = edges.base
    finished = times.many(-1, edges.slots)
    finished[edges.always : edges.always + edges.units] = times.many(0, edges.units)
    starts = tuple(times.many(0, 0) for _ in lists)
    ends = tuple(times.many(0, 0) for _ in lists)
    free: list[Time] = [0] * len(lists)
    lengths = [times.by_operation(rank, tokens) for rank, tokens in enumerate(lists)]
    length = times.length
    stops = list(map(len, lists))
    for lane in beside:
        stops[lane.rank] = lane.next_stop
    waiting: dict[int, int] = {}
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        my_starts, my_ends, my_lengths = starts[rank], ends[rank], lengths[rank]
        now = free[rank]
        tokens = lists[rank]
        index, stop = len(my_ends), stops[rank]
        while index < stop:
            token = tokens[index]
            low = token & LOW
            unit = token >> UNIT_SHIFT & UNITS
            arrived = finished[need_base[low] + unit]
            if arrived < 0:
                waiting[need_base[low] + unit] = rank
                break
            start = arrived + lag[low]
            if start < now:
                start = now
            if token < JOINED:
                now = start + (length[low] if my_lengths is None else my_lengths[index])
                my_starts.append(start)
                my_ends.append(now)
                now += hold[low]
                slot = make_base[low] + unit
                finished[slot] = now
                if slot in waiting:
                    ready.append(waiting.pop(slot))
                index += 1
                continue
            second = tokens[index + 1]
            other, after = second & LOW, second >> UNIT_SHIFT & UNITS
            arrived = finished[need_base[other] + after]
            if arrived < 0:
                waiting[need_base[other] + after] = rank
                break
            start = max(start, arrived + lag[other])
            if my_lengths is None:
                now = start + (length[low] + length[other]) * factor
            else:
                now = start + (my_lengths[index] + my_lengths[index + 1]) * factor
            my_starts.extend((start, start))
            my_ends.extend((now, now))
            now += hold[low] + hold[other]
            for slot in (make_base[low] + unit, make_base[other] + after):
                finished[slot] = now
                if slot in waiting:
                    ready.append(waiting.pop(slot))
            index += 2
        else:
            if beside and beside[rank].stops:
                now = beside[rank].act(my_ends[-1] if my_ends else 0, now)
                stops[rank] = beside[rank].next_stop
                ready.append(rank)
        free[rank] = now
    if waiting:
        raise ScheduleError(f"schedule {schedule.name}: it deadlocks, so it has no timeline")
    return Timeline(schedule, starts, ends, cost, *complete(schedule, beside, ends))


class Times:
    """The times of one schedule's operations and messages, by low part (see Edges)."""

    def __init__(self, edges: Edges, cost: Cost) -> None:
        self.edges, self.cost = edges, cost
        schedule = edges.schedule
        if cost.slices is not None and len(cost.slices) != schedule.slices:
            raise ScheduleError(
                f"cost slices: {len(cost.slices)} shares for {schedule.slices} slices; "
                "give one per slice"
            )
        table = cost.table(edges.stages)
        self.length: list[Time] = []
        self.lag: list[Time] = []
        self.hold: list[Time] = []
        part = Fraction(1, schedule.slices)
        for low, kind, lane, stage in edges.by_low():
            for column in (self.length, self.lag, self.hold):
                column.extend(repeat(0, low + 1 - len(column)))
            share = lane.size if cost.slices else lane.size * part
            self.length[low] = _scaled(table[kind][stage], share)
            came, goes = edges.incoming[low], edges.outgoing[low]
            if came and cost.overlap:
                self.lag[low] = plain(cost.link(*came, lane.size * part))
            if goes and not cost.overlap:
                self.hold[low] = plain(cost.link(*goes, lane.size * part))
        times = [*self.length, *self.lag, *self.hold, *(cost.slices or ()), cost.overlap_factor]
        times += cost.per_stage("gather", edges.stages)
        if cost.zero >= 2:  # a rank may wait for a reduction
            times += cost.per_stage("reduce", edges.stages)
        floating = cost.jitter or any(isinstance(time, float) for time in times)
        whole = all(isinstance(time, int) for time in times)
        self.typecode = "d" if floating else "q" if whole else None

    def many(self, value: int, count: int) -> list[Time]:
        """Equal times: packed where the type allows it, in an array used as a list."""
        if self.typecode is None:
            return [value] * count
        return cast("list[Time]", array(self.typecode, [value]) * count)

    def by_operation(self, rank: int, tokens: "array[int]") -> list[Time] | None:
        """The time that each operation of a list takes, where `length` does not tell."""
        cost, schedule = self.cost, self.edges.schedule
        if not (schedule.recompute or cost.slices or cost.jitter):
            return None
        ahead = {
            (token & ~JOINED) >> STAGE_SHIFT for token in tokens if token & KIND_MASK == Kind.R
        }
        rolls = random.Random(f"{cost.seed} {rank}")
        result = []
        for token in tokens:
            low = token & LOW
            time = self.length[low]
            stage = (low >> STAGE_SHIFT) % self.edges.stages
            if (
                stage in schedule.recompute
                and token & KIND_MASK in (Kind.I, Kind.B)
                and (token & ~JOINED) >> STAGE_SHIFT not in ahead
            ):
                time += self.length[low - low % (1 << STAGE_SHIFT) + Kind.R]
            if cost.slices:
                time *= cost.slices[(token >> UNIT_SHIFT & UNITS) % schedule.slices]
            if cost.jitter:
                time = float(time) * (1 + cost.jitter * rolls.uniform(-1, 1))
            result.append(time)
        return result


def _scaled(time: Time, share: Fraction) -> Time:
    return time * float(share) if isinstance(time, float) else plain(time * share)
