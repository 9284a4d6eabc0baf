"""Varuna's opportunistic deviation (2111.04007), simulated: ranks that do not wait in order.

A static list is made for expected times. Where operations take longer or shorter than that, its
head may still wait for a message when an operation behind it could run. The executor keeps to the
list, so that results are the same bitwise and memory is as promised; this module says what that
costs. A rank that deviates runs forwards ahead and may hold more activations.
"""

from dataclasses import replace
from heapq import heappop, heappush

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.data_parallel import REPLICAS, ReplicaPolicy
from megapipe.schedule.dependencies import LOW, PIECE_SHIFT, PIECES, Dependencies
from megapipe.schedule.ir import JOINED, STAGE_SHIFT, Schedule, packed
from megapipe.schedule.timing.data_parallel import complete, make_lanes, replay
from megapipe.schedule.timing.simulate import Timeline
from megapipe.schedule.timing.times import OpTimes


def deviate(
    schedule: Schedule, cost: Cost, window: int, policy: ReplicaPolicy = REPLICAS
) -> Timeline:
    """Time a valid schedule whose ranks, if their next operation waits, may run another one of the
    `window` next ones: the first whose input is there.

    Operations of one kind at one stage keep their order, and every operation takes as long as in
    :func:`~megapipe.schedule.timing.simulate.simulate`, jitter included. The timeline's schedule
    has the lists as they were run.

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
    if policy.zero >= 2 and cost.has_replicas(schedule.placement.stages):
        raise ScheduleError(
            f"schedule {schedule.name}: ZeRO-{policy.zero} gathers and reduces as a fixed order "
            "asks for; deviate with zero 0 or 1"
        )
    return _Run(schedule, cost, window, policy).timeline()


class _Run:
    """All ranks, and the events at which one may have something to do."""

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
            self.dependencies.always + piece: 0 for piece in range(self.dependencies.pieces)
        }
        self.consumer = {
            need[code & LOW] + (code >> PIECE_SHIFT & PIECES): rank
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
        """The place in the list of what to run now, or else when the next input arrives."""
        need, _ = self.dependencies.base
        passed: set[int] = set()  # kinds at stages: their operations keep their order
        begun: set[tuple[int, int]] = set()  # (node, piece): its operations need each other
        soon: Time | None = None
        for place, (_, code, _) in enumerate(self.pending[rank][: self.window]):
            low, piece = code & LOW, code >> PIECE_SHIFT & PIECES
            at = low >> STAGE_SHIFT, piece
            blocked = low in passed or at in begun
            passed.add(low)
            begun.add(at)
            end = self.arrived.get(need[low] + piece)
            if blocked or end is None:
                continue
            stage = (low >> STAGE_SHIFT) % self.dependencies.stages
            start = max(end + self.times.lag[low], self._gathered(rank, stage))
            if start <= now:
                return place, None
            soon = start if soon is None else min(soon, start)
        return None, soon

    def _gathered(self, rank: int, stage: int) -> Time:
        """When the weights of a stage are there."""
        return self.lanes[rank].gathered(stage) if self.lanes else 0

    def _execute(self, rank: int, place: int, now: Time) -> int:
        """Run an operation of the list; the slot that it fills."""
        index, code, length = self.pending[rank].pop(place)
        low = code & LOW
        self.lists[rank].append(self.schedule.ops[rank][index])
        self.starts[rank].append(now)
        self.ends[rank].append(now + length)
        self.free[rank] = now + length + self.times.hold[low]
        made = self.dependencies.base[1][low] + (code >> PIECE_SHIFT & PIECES)
        self.arrived[made] = self.free[rank]
        return made
