"""What a rank would gain by not waiting: Varuna's opportunistic deviation (2111.04007), simulated.

A static list is made for expected times. Where operations take longer or shorter than that, its
head may still wait for a message when an operation behind it could run. The executor keeps to the
list, so that results are the same bitwise and memory is what was promised; this says what that
costs. Whoever deviates runs forwards ahead and may hold more.
"""

from dataclasses import replace
from heapq import heappop, heappush

from megapipe.errors import ScheduleError
from megapipe.schedule.collectives import complete, make_lanes, replay
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.edges import LOW, UNIT_SHIFT, UNITS, Edges
from megapipe.schedule.ir import JOINED, STAGE_SHIFT, Schedule, packed
from megapipe.schedule.simulate import Timeline
from megapipe.schedule.times import Times


def deviate(schedule: Schedule, cost: Cost, window: int) -> Timeline:
    """A valid schedule in time if a rank whose next operation waits may run one of the `window`
    next ones instead, the first whose input is there.

    Operations of one kind at one stage keep their order, and every operation takes as long as in
    :func:`~megapipe.schedule.simulate.simulate`, jitter included. The timeline's schedule has the
    lists as they were run.

    Raises:
        ScheduleError: a window below 1, a schedule with joined operations or slices, or ZeRO-2 or
            3, whose gathers and reductions go with a fixed order.
    """
    if window < 1:
        raise ScheduleError(f"schedule {schedule.name}: the window must be at least 1: {window}")
    if schedule.slices > 1 or any(max(ops, default=0) >= JOINED for ops in schedule.ops):
        raise ScheduleError(
            f"schedule {schedule.name}: slices and joined operations have no other order"
        )
    if cost.zero >= 2 and cost.has_replicas(schedule.placement.stages):
        raise ScheduleError(
            f"schedule {schedule.name}: ZeRO-{cost.zero} gathers and reduces as a fixed order asks "
            "for; deviate with zero 0 or 1"
        )
    return _Run(schedule, cost, window).timeline()


class _Run:
    """All ranks, and the events at which one may have something to do."""

    def __init__(self, schedule: Schedule, cost: Cost, window: int) -> None:
        self.schedule, self.cost, self.window = schedule, cost, window
        self.edges = Edges(schedule)
        self.times = Times(self.edges, cost)
        ranks = range(schedule.placement.ranks)
        tokens = [self.edges.tokens(rank) for rank in ranks]
        given = [self.times.by_operation(rank, tokens[rank]) for rank in ranks]
        self.pending = [
            [
                (i, token, self._length(token, given[rank], i))
                for i, token in enumerate(tokens[rank])
            ]
            for rank in ranks
        ]
        self.free: list[Time] = [0 for _ in ranks]
        self.lists: list[list[int]] = [[] for _ in ranks]
        self.starts: list[list[Time]] = [[] for _ in ranks]
        self.ends: list[list[Time]] = [[] for _ in ranks]
        self.lanes = make_lanes(schedule, self.times)
        need, _ = self.edges.base
        self.arrived: dict[int, Time] = {
            self.edges.always + unit: 0 for unit in range(self.edges.units)
        }
        self.consumer = {
            need[token & LOW] + (token >> UNIT_SHIFT & UNITS): rank
            for rank in ranks
            for token in tokens[rank]
        }

    def _length(self, token: int, given: list[Time] | None, index: int) -> Time:
        return self.times.length[token & LOW] if given is None else given[index]

    def timeline(self) -> Timeline:
        events: list[tuple[Time, int]] = [(0, rank) for rank in range(len(self.pending))]
        while events:
            now, rank = heappop(events)
            if now < self.free[rank] or not self.pending[rank]:
                continue
            place, soon = self._choose(rank, now)
            if place is None:
                if soon is not None:
                    heappush(events, (soon, rank))
                continue
            made = self._execute(rank, place, now)
            heappush(events, (self.free[rank], rank))
            if made in self.consumer:
                heappush(events, (self.free[rank], self.consumer[made]))
        assert not any(self.pending), "the schedule deadlocks"
        lists = tuple(map(packed, self.lists))
        run = replace(self.schedule, ops=lists, held_limit=None)
        beside = make_lanes(run, self.times)
        for lane, planned in zip(beside, self.lanes, strict=True):
            lane.gathers = planned.gathers
        replay(beside, self.starts, self.ends)
        between = complete(beside)
        return Timeline(
            run,
            tuple(self.starts),
            tuple(self.ends),
            self.cost,
            *between,
            per_unit=self.times.per_unit,
        )

    def _choose(self, rank: int, now: Time) -> tuple[int | None, Time | None]:
        """The place in the list of what to run now, or else when the next input arrives."""
        need, _ = self.edges.base
        passed: set[int] = set()  # kinds at stages: their operations keep their order
        begun: set[tuple[int, int]] = set()  # (node, unit): its operations need each other
        soon: Time | None = None
        for place, (_, token, _) in enumerate(self.pending[rank][: self.window]):
            low, unit = token & LOW, token >> UNIT_SHIFT & UNITS
            piece = low >> STAGE_SHIFT, unit
            blocked = low in passed or piece in begun
            passed.add(low)
            begun.add(piece)
            end = self.arrived.get(need[low] + unit)
            if blocked or end is None:
                continue
            stage = (low >> STAGE_SHIFT) % self.edges.stages
            at = max(end + self.times.lag[low], self._gathered(rank, stage))
            if at <= now:
                return place, None
            soon = at if soon is None else min(soon, at)
        return None, soon

    def _gathered(self, rank: int, stage: int) -> Time:
        """When the weights of a stage are there."""
        return self.lanes[rank].gathered(stage) if self.lanes else 0

    def _execute(self, rank: int, place: int, now: Time) -> int:
        """Run an operation of the list; the slot that it fills."""
        index, token, length = self.pending[rank].pop(place)
        low = token & LOW
        self.lists[rank].append(self.schedule.ops[rank][index])
        self.starts[rank].append(now)
        self.ends[rank].append(now + length)
        self.free[rank] = now + length + self.times.hold[low]
        made = self.edges.base[1][low] + (token >> UNIT_SHIFT & UNITS)
        self.arrived[made] = self.free[rank]
        return made
