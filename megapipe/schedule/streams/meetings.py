"""Meetings of the ranks of a stage, in a stream that has several of them for one (1F1B-RR).

A stage's gradients of a window are one sum over its ranks, and each of these updates a slice. So
they wait for each other:

- behind its last backward of a window a rank waits for that of the others of its stage, and then
  begins to add up the totals of the window over all ranks;
- an update that waits for totals needs all ranks to be there;
- the first forward that reads a new version needs the updates of all ranks of its stage.

Messages wait for nobody. The lists of all ranks are played with these rules: where they come to
their end, no ranks can ever wait for each other in a circle, whatever an operation takes.
"""

from collections import defaultdict
from collections.abc import Callable

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Kind, Op, Schedule


def check_shared_updates(schedule: Schedule) -> None:
    """Prove that a valid schedule with updates comes to its end although ranks meet.

    Raises:
        ScheduleError: the ranks that wait for each other, and their operations.
    """
    placement = schedule.placement
    if any(len(placement.holders(stage)) > 1 for stage in range(placement.stages)):
        play(schedule, lambda op: 0)


def play(schedule: Schedule, length: Callable[[Op], Time]) -> list[list[Time]]:
    """When operations end that take this long, by rank; messages take no time.

    Raises:
        ScheduleError: the ranks that wait for each other, and their operations.
    """
    lists = [schedule.rank_ops(rank) for rank in range(schedule.placement.ranks)]
    game = _Game(schedule)
    ends: list[list[Time]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while len(ends[rank]) < len(ops):
                place = len(ends[rank])
                begin = game.begin(rank, place, ops[place])
                if begin is None:
                    break
                end = max([begin, *ends[rank][-1:]]) + length(ops[place])
                ends[rank].append(end)
                game.note(rank, ops[place], end)
                moved = True
    stuck = [
        f"rank {rank} at {ops[len(done)]}"
        for rank, (ops, done) in enumerate(zip(lists, ends, strict=True))
        if len(done) < len(ops)
    ]
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name}: the ranks of a stage meet behind each window, and then "
            f"{', '.join(stuck)} wait for each other; take longer windows"
        )
    return ends


class _Game:
    """The outputs that are there so far, and since when."""

    def __init__(self, schedule: Schedule) -> None:
        assert schedule.updates is not None
        self._schedule, self._updates = schedule, schedule.updates
        placement = schedule.placement
        self._stages = placement.stages
        self._holders = [placement.holders(stage) for stage in range(placement.stages)]
        self._made: dict[tuple[Kind, int, int], Time] = {}
        """Outputs of forwards and backwards."""
        self._left: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        """By rank, stage and window, backwards that are to come."""
        for rank in range(placement.ranks):
            for op in schedule.rank_ops(rank):
                if op.kind == Kind.B:
                    self._left[rank, op.stage, self._window(op)] += 1
        self._through: dict[tuple[int, int, int], Time] = {}
        """By rank, stage and window, ends of last backwards."""
        self._updated: dict[tuple[int, int, int], Time] = {}
        """By rank, stage and version, ends of updates."""
        self._last: dict[int, tuple[int, int]] = {}
        """By rank, stage and window of its last meeting."""

    def _window(self, op: Op) -> int:
        return op.microbatch // self._updates.window

    def begin(self, rank: int, place: int, op: Op) -> Time | None:
        """When all is there that an operation of a rank waits for; None: not yet."""
        needed: list[Time | None] = []
        if rank in self._last:
            stage, window = self._last[rank]
            needed += self._all_through(stage, window)
        if op.kind == Kind.U:
            waits = self._updates.waits
            for stage in range(self._stages) if waits else [op.stage]:
                needed += self._all_through(stage, op.microbatch)
        else:
            version = self._updates.reads[rank][place].version
            if version:
                holders = self._holders[op.stage]
                needed += [self._updated.get((each, op.stage, version)) for each in holders]
            other = op.stage - 1 if op.kind == Kind.F else op.stage + 1
            if 0 <= other < self._stages:
                needed.append(self._made.get((op.kind, other, op.microbatch)))
        there = [each for each in needed if each is not None]
        return max(there, default=0) if len(there) == len(needed) else None

    def _all_through(self, stage: int, window: int) -> list[Time | None]:
        return [self._through.get((rank, stage, window)) for rank in self._holders[stage]]

    def note(self, rank: int, op: Op, end: Time) -> None:
        """An operation has ended."""
        if op.kind == Kind.U:
            self._updated[rank, op.stage, op.microbatch + 1] = end
            return
        self._made[op.kind, op.stage, op.microbatch] = end
        if op.kind == Kind.B:
            key = rank, op.stage, self._window(op)
            self._left[key] -= 1
            if not self._left[key]:
                self._through[key] = end
                self._last[rank] = key[1:]
