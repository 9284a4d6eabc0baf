"""Simulation of ranks that deviate from their lists instead of waiting (Varuna, 2111.04007).

A schedule is made for expected times. If operations take longer or shorter, the next operation of a
list may still wait for a message when a later one could run. The executor keeps to the list, so
that results are bitwise the same and memory is as promised; this module computes how much time that
costs. A rank that deviates runs forwards ahead and can hold more activations.
"""

from dataclasses import replace
from heapq import heappop, heappush

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.data_parallel import REPLICAS, ReplicaPolicy
from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, STAGE_SHIFT, Schedule, packed
from megapipe.schedule.timing.data_parallel import complete, make_lanes, replay
from megapipe.schedule.timing.simulate import Timeline
from megapipe.schedule.timing.times import OpTimes


def deviate(
    schedule: Schedule, cost: Cost, window: int, policy: ReplicaPolicy = REPLICAS
) -> Timeline:
    """Simulate a valid schedule whose ranks deviate: if a rank's next operation has to wait, the
    rank runs the first of its next `window` operations that has its input.

    Operations of one kind at one stage keep their order, and every operation takes as long as in
    :func:`~megapipe.schedule.timing.simulate.simulate`, jitter included. The schedule of the
    returned timeline has its lists in the order in which operations ran.

    Raises:
        ScheduleError: a window below 1, a schedule with joined operations or slices, or ZeRO-2 or
            3, whose gathers and reductions need a fixed order.
    """
    if window < 1:
        raise ScheduleError(
            f"schedule {schedule.name}: the window must be at least 1, not {window}"
        )
    if schedule.slices > 1 or any(max(ops, default=0) >= JOINED for ops in schedule.ops):
        raise ScheduleError(
            f"schedule {schedule.name}: ranks cannot deviate if it has slices or joined operations"
        )
    if schedule.placement.spanning:
        raise ScheduleError(
            f"schedule {schedule.name}: ranks cannot deviate if a stage spans all ranks"
        )
    if policy.zero >= 2 and cost.has_replicas(schedule.placement.stages):
        raise ScheduleError(
            f"schedule {schedule.name}: ZeRO-{policy.zero} gathers and reduces between operations "
            "in a fixed order, so ranks cannot deviate; use zero 0 or 1"
        )
    return _Run(schedule, cost, window, policy).timeline()


class _Run:
    """Event loop over all ranks; an event is a time at which a rank might be able to continue."""

    def __init__(self, schedule: Schedule, cost: Cost, window: int, policy: ReplicaPolicy) -> None:
        self.schedule, self.cost, self.window = schedule, cost, window
        self.dependencies = Dependencies(schedule)
        self.times = OpTimes(self.dependencies, cost, policy)
        ranks = range(schedule.placement.ranks)
        codes = [self.dependencies.codes(rank) for rank in ranks]
        given = [self.times.by_operation(rank, codes[rank]) for rank in ranks]
        self.pending = [
            [(i, code, self._length(code, given[rank], i)) for i, code in enumerate(codes[rank])]
            for rank in ranks
        ]
        self.free: list[Time] = [0 for _ in ranks]
        self.lists: list[list[int]] = [[] for _ in ranks]
        self.starts: list[list[Time]] = [[] for _ in ranks]
        self.ends: list[list[Time]] = [[] for _ in ranks]
        self.lanes = make_lanes(schedule, self.times)
        need, _ = self.dependencies.base
        self.arrived: dict[int, Time] = {
            self.dependencies.always + item: 0 for item in range(self.dependencies.work_items)
        }
        self.consumer = {
            need[code & LOW] + (code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK): rank
            for rank in ranks
            for code in codes[rank]
        }

    def _length(self, code: int, given: list[Time] | None, index: int) -> Time:
        return self.times.length[code & LOW] if given is None else given[index]

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
        run = replace(self.schedule, ops=lists, activation_bound=None)
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
            self.times.policy,
            self.times.per_unit,
        )

    def _choose(self, rank: int, now: Time) -> tuple[int | None, Time | None]:
        """Return (index in `pending` of the operation to run now, None). If none can run now,
        return (None, time at which the first one can run, or None if that is not known)."""
        need, _ = self.dependencies.base
        passed: set[int] = set()  # kinds at stages: their operations keep their order
        begun: set[tuple[int, int]] = set()  # (node, item): its operations need each other
        soon: Time | None = None
        for place, (_, code, _) in enumerate(self.pending[rank][: self.window]):
            low, item = code & LOW, code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
            at = low >> STAGE_SHIFT, item
            blocked = low in passed or at in begun
            passed.add(low)
            begun.add(at)
            end = self.arrived.get(need[low] + item)
            if blocked or end is None:
                continue
            stage = (low >> STAGE_SHIFT) % self.dependencies.stages
            start = max(end + self.times.lag[low], self._gathered(rank, stage))
            if start <= now:
                return place, None
            soon = start if soon is None else min(soon, start)
        return None, soon

    def _gathered(self, rank: int, stage: int) -> Time:
        """Return the time at which the gathered weights of a stage are ready."""
        return self.lanes[rank].gathered(stage) if self.lanes else 0

    def _execute(self, rank: int, place: int, now: Time) -> int:
        """Run the operation at index `place` of `pending`; return the number of its result."""
        index, code, length = self.pending[rank].pop(place)
        low = code & LOW
        self.lists[rank].append(self.schedule.ops[rank][index])
        self.starts[rank].append(now)
        self.ends[rank].append(now + length)
        self.free[rank] = now + length + self.times.hold[low]
        made = self.dependencies.base[1][low] + (code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK)
        self.arrived[made] = self.free[rank]
        return made
