"""A second simulator: slow, and from the meaning of programs and costs alone.

Every rank is a coroutine that goes through its real program, messages and all, action by action.
"""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction

from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import REPLICAS, ReplicaPolicy, with_zero_actions
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.timing.data_parallel import Interval
from tests.unit.schedule.schedule_referee import home_of


class Meaning:
    """What an operation of a schedule takes, and its messages."""

    def __init__(self, schedule: Schedule, cost: Cost) -> None:
        self.schedule, self.cost = schedule, cost
        self.stages, self.slices = schedule.placement.stages, schedule.slices
        self.ahead = {
            (op.stage, op.microbatch)
            for rank in range(len(schedule.ops))
            for op in schedule.rank_ops(rank)
            if op.kind == Kind.R
        }

    def of_stage(self, what, stage):
        value = getattr(self.cost, what)
        if value is None:
            return sum(self.of_stage(each, stage) for each in {"B": "IW", "R": "F"}[what])
        return value[stage] if isinstance(value, tuple) else value

    def length(self, op: Op):
        time = self.of_stage(op.kind.name, op.stage)
        late = op.stage in self.schedule.recompute and (op.stage, op.microbatch) not in self.ahead
        if op.kind in (Kind.I, Kind.B) and late:
            time += self.of_stage("R", op.stage)
        share = self.cost.slices[op.slice] if self.cost.slices else Fraction(1, self.slices)
        return time * share * self.schedule.size_of(op.microbatch)

    def link(self, op: Op, step: int):
        """Return the time from an operation to that of the stage `step` further."""
        other = op._replace(stage=op.stage + step)
        if not 0 <= other.stage < self.stages:
            return 0
        pair = home_of(op, self.schedule), home_of(other, self.schedule)
        if pair[0] == pair[1]:
            return 0
        latency = self.cost.latency
        latency = latency.get(pair, 0) if isinstance(latency, dict) else latency
        size = self.cost.message * self.schedule.size_of(op.microbatch) / self.slices
        return latency + (size / self.cost.bandwidth if self.cost.bandwidth else 0)

    def hold(self, op: Op):
        if self.cost.overlap or op.kind in (Kind.W, Kind.R):
            return 0
        return self.link(op, 1 if op.kind == Kind.F else -1)


class Clocks:
    """All ranks, run until all have ended."""

    def __init__(self, schedule: Schedule, cost: Cost, policy: ReplicaPolicy = REPLICAS) -> None:
        self.schedule, self.cost, self.meaning = schedule, cost, Meaning(schedule, cost)
        self.policy = policy
        ranks = range(schedule.placement.ranks)
        self.times = [[] for _ in ranks]
        """(start, end) of every operation, by rank."""
        self.lane = [0 for _ in ranks]
        self.gathers: list[Interval] = []
        self.reductions: list[Interval] = []
        self.programs = lower(schedule)
        self._come = defaultdict(dict)  # stage of several holders: when each came to reduce it
        self._sent = {}  # (forward?, stage, micro-batch, slice): when it leaves
        running = [self._rank(rank) for rank in ranks]
        while running:
            running = [each for each in running if next(each, "over") != "over"]

    def _rank(self, rank: int) -> Iterator[None]:
        now, there, reduced, under_way = 0, {}, {}, []
        groups = grouped(self.schedule, self.programs[rank], self.policy)
        if self.policy.zero < 3:
            for action in (action for first, _, _ in groups for action in first):
                if action.do == ActionKind.WAIT_WEIGHTS:
                    there[action.stage] = self._collective("gather", action.stage, rank, 0)
        behind = None  # a stage for whose other holders the lane waits
        for first, ops, last in groups:
            for action in first:
                while behind is not None and rank in self._come[behind]:
                    yield
                if action.do == ActionKind.UNSHARD:
                    there[action.stage] = self._collective("gather", action.stage, rank, now)
                elif action.do == ActionKind.WAIT_WEIGHTS:
                    now = max(now, there[action.stage])
                elif action.do == ActionKind.ALLOC_GRADS:
                    now = max(now, reduced.get(action.stage, 0), *under_way[:-1])
            while None in (arrivals := [self._arrival(op) for op in ops]):
                yield
            start = max([now, *arrivals])
            factor = self.cost.overlap_factor if len(ops) > 1 else 1
            end = start + factor * sum(map(self.meaning.length, ops))
            self.times[rank] += [(start, end)] * len(ops)
            now = end + sum(map(self.meaning.hold, ops))
            for op in ops:
                if op.kind not in (Kind.W, Kind.R):
                    self._sent[(op.kind == Kind.F, *op[1:4])] = now
            for action, op in last:
                while behind is not None and rank in self._come[behind]:
                    yield
                if len(self.schedule.placement.holders(action.stage)) > 1:
                    behind = action.stage
                    self._meet(behind, rank, end)
                    continue
                for after, share in self._pieces(action.stage, op):
                    ready = start + after * (end - start)
                    over = self._collective("reduce", action.stage, rank, ready, share)
                reduced[action.stage] = over
                under_way.append(over)

    def _pieces(self, stage: int, before: Op):
        """Return the pieces of a reduction, which leave during the operation before it if that
        computes their gradients."""
        if not self.cost.buckets:
            return [(1, 1)]
        computes = before.stage == stage and before.kind in (Kind.B, Kind.W)
        return [(after if computes else 1, share) for after, share in self.cost.buckets[stage]]

    def _meet(self, stage: int, rank: int, ready) -> None:
        """Begin a stage's reduction once the last holder has come and all lanes are free."""
        if not self.meaning.of_stage("reduce", stage):
            return
        come = self._come[stage]
        come[rank] = ready
        if len(come) == len(self.schedule.placement.holders(stage)):
            start = max(*come.values(), *(self.lane[each] for each in come))
            for each in list(come):
                self._collective("reduce", stage, each, start)
                del come[each]

    def _arrival(self, op: Op):
        if op.kind in (Kind.W, Kind.R):
            return 0
        forward = op.kind == Kind.F
        other = op._replace(stage=op.stage + (-1 if forward else 1))
        if not 0 <= other.stage < self.meaning.stages:
            return 0
        left = self._sent.get((forward, *other[1:4]))
        if left is None or not self.cost.overlap:
            return left
        return left + self.meaning.link(other, 1 if forward else -1)

    def _collective(self, what: str, stage: int, rank: int, ready, share=1):
        """Return when a collective ends that begins once it is ready and the lane is free."""
        time = share * self.meaning.of_stage(what, stage)
        if not time:
            return ready
        start = max(ready, self.lane[rank])
        self.lane[rank] = start + time
        done = self.gathers if what == "gather" else self.reductions
        done.append(Interval(stage, rank, start, self.lane[rank]))
        return self.lane[rank]


def grouped(
    schedule: Schedule, program: Program, policy: ReplicaPolicy
) -> list[tuple[list[Action], list[Op], list[tuple[Action, Op | None]]]]:
    """Group a rank's program: its operations, joined ones together, each group with what comes
    before it and the reductions after it, with the operation before each."""
    (whole,) = with_zero_actions(
        [program],
        schedule,
        policy,
    )
    ops = iter(schedule.rank_ops(program.rank))
    groups: list[tuple[list[Action], list[Op], list[tuple[Action, Op | None]]]] = []
    first: list[Action] = []
    for action in whole.actions:
        if action.do == ActionKind.COMPUTE:
            op = next(ops)
            assert op[:4] == action[1:5]
            if groups and groups[-1][1] and groups[-1][1][-1].joined:
                groups[-1][0].extend(first)
                groups[-1][1].append(op)
            else:
                groups.append((first, [op], []))
            first = []
        elif action.do == ActionKind.REDUCE:
            if not groups:  # a rank that computes nothing
                groups.append(([], [], []))
            groups[-1][2].append((action, groups[-1][1][-1] if groups[-1][1] else None))
        elif action.do not in (ActionKind.SEND, ActionKind.RECV):
            first.append(action)
    return groups
