"""When a rank's stages are gathered and reduced over its data-parallel peers.

The programs of :mod:`megapipe.schedule.data_parallel` say where these collectives begin and where a
rank waits for them, so a simulation and a training step cannot differ in that. Every rank has one
lane for them, beside computation and messages: they run one at a time, in the program's order.
Operations wait for their weights. Under ZeRO-2 and 3, where two stages at most have memory for
gradients (:mod:`megapipe.optim.optimizer`), a rank waits before a run of weight gradients
(ALLOC_GRADS) until all reductions but the latest are over, and any reduction of the same stage. A
reduction in buckets begins within the operation that completes them.

A stage with several holders is reduced when the programs and the lanes of all have come to it, and
all take part from start to end; later collectives on their lanes wait. Each holder gathers weights
for itself. One thing is not in the programs: under ZeRO-0, 1 and 2 all gathers begin at the end of
the step before, here from time 0 on, in the order in which the rank uses its stages.
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
    """When a rank gathers or reduces one of its stages."""

    stage: int
    rank: int
    start: Time
    end: Time

    def scaled(self, per_unit: int) -> "Interval":
        """The interval, which is in ticks, in a unit of `per_unit` ticks."""
        times = (scaled(time, per_unit) for time in (self.start, self.end))
        return Interval(self.stage, self.rank, *times)


class Stop(NamedTuple):
    """Where a rank's program has an action between operations."""

    done: int
    """Operations before the action."""
    action: Action
    in_buckets: bool = False
    """A REDUCE that begins within the operation before it, as buckets are complete."""


class CollectiveQueue:
    """The gathers and reductions of one rank, begun one after the other.

    A simulation runs the rank's operations up to the next of its `stops`, calls :meth:`act`, and
    goes on at the time that it returns unless the lane is :attr:`held`. `gathers` and `reductions`
    are those begun so far. `company` has, by stage with several holders, the lanes of all holders.
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
        """By stage, when its latest reduction ends."""
        self._last: Time = 0
        """When the latest reduction ends, and when all before it have."""
        self._before_last: Time = 0
        self._meeting: tuple[int, Time] | None = None
        """The stage that this lane has come to reduce with others, and when."""
        self.stops = self._stops(ops, actions)
        """The stops to come, the next one last."""
        if times.policy.zero < 3:
            for action in actions:
                if action.do == ActionKind.WAIT_WEIGHTS:
                    self._begin_gather(action.stage, 0)

    @property
    def next_stop(self) -> int:
        """How many operations come before the next stop, or in all."""
        return self.stops[-1].done if self.stops else self._length

    def _stops(self, ops: Sequence[int], actions: Sequence[Action]) -> list[Stop]:
        """The stops of a program, the last first. Two joined operations run as one: an action
        between them is done before both, a reduction after both."""
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
        """Whether the lane waits for other holders to come to its next reduction."""
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
        """When a stage's latest gathered weights are there; 0 where gathering takes no time."""
        return self._gathered.get(stage, 0)

    def act(self, began: Time, ended: Time, now: Time) -> tuple[Time, list[int]]:
        """Do the action of the next stop; returns when the rank goes on, and which ranks may.

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
        """Reduce a stage as soon as all its holders have come; the ranks that may go on."""
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
        """Reduce each bucket of a stage as soon as its gradients are ready and the lane is free;
        they are completed from `began` to `ended`."""
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
        """Put a collective of length `time` on the lane; returns its end."""
        if not time:
            return ready
        start = max(ready, self.free)
        self.free = start + time
        done.append(Interval(stage, self.rank, start, self.free))
        return self.free


def make_lanes(schedule: Schedule, times: OpTimes) -> list[CollectiveQueue]:
    """A lane for each rank; no lanes where neither gathers nor reductions take time."""
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
    """Run all stops of the lanes, given each rank's `starts` and `ends` of operations."""
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
    """All gathers, by rank and start, and all reductions, by start."""
    assert not any(lane.stops or lane.held for lane in lanes), "ranks wait for each other"
    gathers = (each for lane in lanes for each in lane.gathers)
    reductions = (each for lane in lanes for each in lane.reductions)
    return tuple(gathers), tuple(sorted(reductions, key=lambda each: (each.start, each.stage)))
