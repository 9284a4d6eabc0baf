"""Timing of the gathers and reductions of stages over data-parallel peers.

The programs of :mod:`megapipe.schedule.data_parallel` say where these collectives begin and where a
rank waits for them, so a simulation and a training step agree on both. Every rank has one queue for
collectives, next to computation and messages: collectives run one at a time, in the program's
order. Operations wait for their weights. Under ZeRO-2 and 3 at most two stages have memory for
gradients (:mod:`megapipe.optim.optimizer`). So before a run of weight gradients (ALLOC_GRADS) a
rank waits for all reductions except the latest, and for any reduction of the same stage. A
reduction in buckets begins within the operation that completes the gradients.

A stage with several holders is reduced when the programs and queues of all holders have come to the
reduction, and all holders take part from start to end; later collectives in their queues wait. Each
holder gathers weights for itself. The gathers of ZeRO-0, 1 and 2 are not in the programs: they
begin at the end of the previous step (time 0 of a simulation), in the order in which the rank uses
its stages.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megapipe.schedule.cost import Time, plain
from megapipe.schedule.data_parallel import last_gradients, operations, with_zero_actions
from megapipe.schedule.ir import JOINED, Schedule
from megapipe.schedule.program import Action, ActionKind
from megapipe.schedule.timing.ticks import scaled
from megapipe.schedule.timing.times import OpTimes


class Interval(NamedTuple):
    """Start and end of a rank's gather or reduction of one stage."""

    stage: int
    rank: int
    start: Time
    end: Time

    def scaled(self, per_unit: int) -> "Interval":
        """Convert the interval from ticks to a unit of `per_unit` ticks."""
        times = (scaled(time, per_unit) for time in (self.start, self.end))
        return Interval(self.stage, self.rank, *times)


class Stop(NamedTuple):
    """A data-parallel action in a rank's program, at which the rank's simulation stops."""

    done: int
    """Number of operations before the action."""
    action: Action
    in_buckets: bool = False
    """Whether this is a REDUCE that begins within the operation before it, bucket by bucket."""


class CollectiveQueue:
    """The gathers and reductions of one rank, begun one after the other.

    A simulation runs the rank's operations up to the next stop, calls :meth:`act`, and continues at
    the returned time unless the queue is :attr:`held`. `gathers` and `reductions` list what has
    begun so far. `company` maps each stage with several holders to the queues of all holders.
    """

    def __init__(
        self,
        rank: int,
        ops: Sequence[int],
        actions: Sequence[Action],
        times: OpTimes,
        company: "Mapping[int, list[CollectiveQueue]]",
    ) -> None:
        self.rank = rank
        self._length = len(ops)
        self._company = company
        for lanes in company.values():
            lanes.append(self)
        self.gathers: list[Interval] = []
        self.reductions: list[Interval] = []
        self.free: Time = 0
        self._gather, self._reduce, self._buckets = times.gather, times.reduce, times.buckets
        self._gathered: dict[int, Time] = {}
        self._reduced: dict[int, Time] = {}
        """End of the latest reduction of each stage."""
        self._last: Time = 0
        """End of the latest reduction."""
        self._before_last: Time = 0
        """End of all reductions before the latest."""
        self._meeting: tuple[int, Time] | None = None
        """Stage that this queue is ready to reduce with other holders, and since which time."""
        self.stops = self._stops(ops, actions)
        """Remaining stops in reverse order: the next stop is at the end."""
        if times.policy.zero < 3:
            for action in actions:
                if action.do == ActionKind.WAIT_WEIGHTS:
                    self._begin_gather(action.stage, 0)

    @property
    def next_stop(self) -> int:
        """Number of operations before the next stop, or of all operations if no stop remains."""
        return self.stops[-1].done if self.stops else self._length

    def _stops(self, ops: Sequence[int], actions: Sequence[Action]) -> list[Stop]:
        """Return the stops of a program in reverse order. Two joined operations run as one: a
        reduction between them is done after both, any other action before both."""
        found: list[Stop] = []
        index = 0
        completed_within = last_gradients(actions)
        for at, action in enumerate(actions):
            if action.do == ActionKind.COMPUTE:
                index += 1
            elif self._takes_time(action):
                joined = index > 0 and ops[index - 1] >= JOINED
                place = index + joined if action.do == ActionKind.REDUCE else index - joined
                found.append(Stop(place, action, at in completed_within))
        return sorted(found, key=lambda stop: stop.done)[::-1]

    @property
    def held(self) -> bool:
        """Whether the queue waits for other holders to come to its next reduction."""
        return self._meeting is not None

    def _takes_time(self, action: Action) -> bool:
        if action.do == ActionKind.REDUCE and action.stage in self._company:
            return self._reduce[action.stage] > 0
        if action.do in (ActionKind.REDUCE, ActionKind.ALLOC_GRADS):
            return any(self._reduce)
        return (
            action.do in (ActionKind.UNSHARD, ActionKind.WAIT_WEIGHTS)
            and self._gather[action.stage] > 0
        )

    def gathered(self, stage: int) -> Time:
        """Return when a stage's gathered weights are ready; 0 if gathering takes no time."""
        return self._gathered.get(stage, 0)

    def act(self, began: Time, ended: Time, now: Time) -> tuple[Time, list[int]]:
        """Do the action of the next stop; return when this rank continues and which ranks can go
        on.

        The operation before the stop ran from `began` to `ended`, and its message is sent by `now`.
        """
        _, action, in_buckets = self.stops.pop()
        if action.do == ActionKind.REDUCE and action.stage in self._company:
            return now, self._meet(action.stage, ended)
        if action.do == ActionKind.REDUCE:
            self._begin_reduce(action.stage, began if in_buckets else ended, ended)
        elif action.do == ActionKind.ALLOC_GRADS:
            now = max(now, self._reduced.get(action.stage, 0), self._before_last)
        elif action.do == ActionKind.UNSHARD:
            self._begin_gather(action.stage, now)
        else:
            now = max(now, self.gathered(action.stage))
        return now, [self.rank]

    def _meet(self, stage: int, ready: Time) -> list[int]:
        """Reduce a stage as soon as the queues of all its holders have come to the reduction;
        return the ranks that can continue."""
        self._meeting = stage, ready
        company = self._company[stage]
        come = [lane._meeting for lane in company if lane._meeting is not None]
        times = [time for place, time in come if place == stage]
        if len(times) < len(company):
            return [self.rank]
        start = max(*times, *(lane.free for lane in company))
        for lane in company:
            lane._meeting = None
            lane._next(lane.reductions, stage, start, lane._reduce[stage])
        return [lane.rank for lane in company]

    def _begin_reduce(self, stage: int, began: Time, ended: Time) -> None:
        """Reduce each bucket of a stage as soon as its gradients are ready and the queue is free;
        the gradients are completed from `began` to `ended`."""
        for bucket in self._buckets[stage]:
            ready = plain(began + bucket.after * (ended - began))
            end = self._next(
                self.reductions, stage, ready, plain(bucket.share * self._reduce[stage])
            )
        self._reduced[stage] = end
        self._last, self._before_last = end, max(self._last, self._before_last)

    def _begin_gather(self, stage: int, ready: Time) -> None:
        self._gathered[stage] = self._next(self.gathers, stage, ready, self._gather[stage])

    def _next(self, done: list[Interval], stage: int, ready: Time, time: Time) -> Time:
        """Put a collective that takes `time` into the queue and into `done`; return its end."""
        if not time:
            return ready
        start = max(ready, self.free)
        self.free = start + time
        done.append(Interval(stage, self.rank, start, self.free))
        return self.free


def make_lanes(schedule: Schedule, times: OpTimes) -> list[CollectiveQueue]:
    """Make a queue for each rank; return no queues if neither gathers nor reductions take time."""
    placement = schedule.placement
    if not any((*times.gather, *times.reduce)):
        return []
    programs = with_zero_actions(
        (operations(schedule, rank) for rank in range(placement.ranks)),
        schedule,
        times.policy,
    )
    company: dict[int, list[CollectiveQueue]] = {
        stage: [] for stage in range(placement.stages) if len(placement.holders(stage)) > 1
    }
    found = []
    for ops, program in zip(schedule.ops, programs, strict=True):
        held = {s: company[s] for s in placement.stages_of(program.rank) if s in company}
        found.append(CollectiveQueue(program.rank, ops, program.actions, times, held))
    return found


def replay(
    lanes: Sequence[CollectiveQueue],
    starts: Sequence[Sequence[Time]],
    ends: Sequence[Sequence[Time]],
) -> None:
    """Do the actions of all queues, given the `starts` and `ends` of each rank's operations."""
    ready = [lane.rank for lane in lanes]
    while ready:
        lane = lanes[ready.pop()]
        if lane.stops and not lane.held:
            done = lane.next_stop
            began = starts[lane.rank][done - 1] if done else 0
            ended = ends[lane.rank][done - 1] if done else 0
            _, going = lane.act(began, ended, ended)
            ready.extend(going)


def complete(lanes: Sequence[CollectiveQueue]) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """Return all gathers, sorted by rank and start, and all reductions, sorted by start."""
    assert not any(lane.stops or lane.held for lane in lanes), "ranks wait for each other"
    gathers = (each for lane in lanes for each in lane.gathers)
    reductions = (each for lane in lanes for each in lane.reductions)
    return tuple(gathers), tuple(sorted(reductions, key=lambda each: (each.start, each.stage)))
