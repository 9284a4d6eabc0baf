"""When a rank's stages are gathered and reduced over its data-parallel peers.

Where these begin and are awaited is what :mod:`megapipe.schedule.synchronise` puts into a rank's
program, so a simulation and a training step cannot differ in it. Every rank has one lane for them,
beside computation and beside messages: one at a time, in the order in which its program begins
them. Operations wait for their weights. Under ZeRO-2 and 3, where two stages at most have memory
for gradients (:mod:`megapipe.optim.optimizer`), a rank waits with a reduction until the one before
is over, and adds to a stage's gradients again when those that it sent off are gone.

Two things are not in the programs. Under ZeRO-0, 1 and 2 all gathers begin at the end of the step
before: here from time 0 on, in the order in which the rank uses its stages. A stage with several
holders is reduced once, when all of them are through with their lists, for only then do they agree
on what comes next: those that are ready go in that order, and all holders take part from start to
end. Weights are gathered by each holder for itself.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_MASK, STAGE_SHIFT, Kind, Schedule
from megapipe.schedule.lower import Action, Do
from megapipe.schedule.synchronise import for_zero, operations
from megapipe.schedule.ticks import scaled
from megapipe.schedule.times import Times


class Interval(NamedTuple):
    """When a rank gathers or reduces one of its stages."""

    stage: int
    rank: int
    start: Time
    end: Time

    def scaled(self, per_unit: int) -> "Interval":
        """The same in another unit, of so many of which this one is a part."""
        times = (scaled(time, per_unit) for time in (self.start, self.end))
        return Interval(self.stage, self.rank, *times)


class Stop(NamedTuple):
    """Where a rank's program has actions between operations."""

    done: int
    """Operations before it."""
    actions: list[Action]


class Lane:
    """The gathers and reductions of one rank, begun one after the other.

    A simulation runs the rank's operations up to the next of its `stops`, calls :meth:`act` and
    goes on when that says. `gathers` and `reductions` are what has begun so far.
    """

    def __init__(
        self, rank: int, ops: Sequence[int], actions: Sequence[Action], times: Times
    ) -> None:
        self.rank = rank
        self._length = len(ops)
        self.gathers: list[Interval] = []
        self.reductions: list[Interval] = []
        self.free: Time = 0
        self._gather, self._reduce = times.gather, times.reduce
        self._gathered: dict[int, Time] = {}
        self._reduced: dict[int, Time] = {}
        """When the last reduction of a stage ends; of all, in order, in `_ends`."""
        self._ends: list[Time] = []
        self.stops = self._stops(ops, actions)
        """Those to come, the next one last."""
        if times.cost.zero < 3:
            for action in actions:
                if action.do == Do.AWAIT:
                    self._begin_gather(action.stage, 0)

    @property
    def next_stop(self) -> int:
        """How many operations come before the next stop, or in all."""
        return self.stops[-1].done if self.stops else self._length

    def _stops(self, ops: Sequence[int], actions: Iterable[Action]) -> list[Stop]:
        """The stops of a program, the last first. Two joined operations run as one: what comes
        between them is done before both, but a reduction after them."""
        found: dict[int, list[Action]] = {}
        index = 0
        for action in actions:
            if action.do == Do.COMPUTE:
                index += 1
            elif self._takes_time(action):
                joined = index > 0 and ops[index - 1] >= JOINED
                place = index + joined if action.do == Do.REDUCE else index - joined
                found.setdefault(place, []).append(action)
        return [Stop(place, found[place]) for place in sorted(found, reverse=True)]

    def _takes_time(self, action: Action) -> bool:
        if action.do in (Do.REDUCE, Do.OPEN):
            return any(self._reduce)
        return action.do in (Do.UNSHARD, Do.AWAIT) and self._gather[action.stage] > 0

    def gathered(self, stage: int) -> Time:
        """When the weights are there that were gathered last; 0 where that takes no time."""
        return self._gathered.get(stage, 0)

    def act(self, ended: Time, now: Time) -> Time:
        """Do what the program says at the next stop: when the rank goes on.

        The operation before `ended` then, and its messages are sent `now`.
        """
        for action in self.stops.pop().actions:
            if action.do == Do.REDUCE:
                self.begin_reduce(action.stage, ended)
            elif action.do == Do.OPEN:
                # of all but the last: the run before this one has waited for the others
                now = max(now, self._reduced.get(action.stage, 0), *self._ends[-2:-1])
            elif action.do == Do.UNSHARD:
                self._begin_gather(action.stage, now)
            else:
                now = max(now, self.gathered(action.stage))
        return now

    def replay(self, ends: Sequence[Time]) -> None:
        """Do all that is left to do, of operations whose ends are known."""
        while self.stops:
            index = self.next_stop
            ended = ends[index - 1] if index else 0
            self.act(ended, ended)

    def begin_reduce(self, stage: int, ready: Time) -> None:
        """Reduce a stage as soon as its gradients are ready and the lane is free."""
        end = self._next(self.reductions, stage, ready, self._reduce[stage])
        self._reduced[stage] = end
        self._ends.append(end)

    def _begin_gather(self, stage: int, ready: Time) -> None:
        self._gathered[stage] = self._next(self.gathers, stage, ready, self._gather[stage])

    def _next(self, done: list[Interval], stage: int, ready: Time, time: Time) -> Time:
        """The end of what comes next on the lane."""
        if not time:
            return ready
        start = max(ready, self.free)
        self.free = start + time
        done.append(Interval(stage, self.rank, start, self.free))
        return self.free


def make_lanes(schedule: Schedule, times: Times) -> list[Lane]:
    """A lane for each rank; none where nothing takes time."""
    placement, cost = schedule.placement, times.cost
    if not any((*times.gather, *times.reduce)):
        return []
    found = []
    for rank, ops in enumerate(schedule.ops):
        program = for_zero(
            operations(schedule, rank),
            placement,
            zero=cost.zero,
            prefetch=cost.prefetch,
            chunked_loss=cost.chunked_loss,
        )
        found.append(Lane(rank, ops, program.actions, times))
    return found


def complete(
    schedule: Schedule, lanes: Sequence[Lane], ends: Sequence[Sequence[Time]]
) -> tuple[tuple[Interval, ...], tuple[Interval, ...]]:
    """All gathers, by rank and start, and all reductions, by start, those of stages with several
    holders included, once all operations have ended: `ends` per rank."""
    if lanes:
        _reduce_shared(schedule, lanes, ends)
    gathers = (each for lane in lanes for each in lane.gathers)
    reductions = (each for lane in lanes for each in lane.reductions)
    return tuple(gathers), tuple(sorted(reductions, key=lambda each: (each.start, each.stage)))


def _reduce_shared(
    schedule: Schedule, lanes: Sequence[Lane], ends: Sequence[Sequence[Time]]
) -> None:
    placement = schedule.placement
    ready: dict[int, Time] = {}
    for stage in _with_gradients(schedule):
        holders = placement.holders(stage)
        if len(holders) > 1:
            ready[stage] = max(ends[rank][-1] for rank in holders if ends[rank])
    for stage in sorted(ready, key=lambda stage: (ready[stage], stage)):
        holders = placement.holders(stage)
        together = max(ready[stage], *(lanes[rank].free for rank in holders))
        for rank in holders:
            lanes[rank].begin_reduce(stage, together)


def _with_gradients(schedule: Schedule) -> set[int]:
    return {
        code >> STAGE_SHIFT & STAGE_MASK
        for ops in schedule.ops
        for code in ops
        if code & KIND_MASK in (Kind.B, Kind.W)
    }
