"""Waits between the ranks of a stage in a no-flush schedule with replicated stages (1F1B-RR).

The gradients of a stage in an update window are reduced over the stage's ranks, and each rank
updates a shard of the weights. So the ranks of a stage wait for each other:

- after its last backward of a window, a rank waits for the last backward of the stage's other ranks
  and then starts to all-reduce the window's totals (for the gradient norm) over all ranks;
- an update that needs the totals waits until all ranks have started this all-reduce;
- the first forward that reads a new version waits for the updates on all ranks of its stage.

Sends never wait. The lists of all ranks are simulated under these rules. If all lists come to their
end, ranks can never deadlock, however long operations take.
"""

from collections import defaultdict
from collections.abc import Callable

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Kind, Op, Schedule


def check_shared_updates(schedule: Schedule) -> None:
    """Prove that a valid no-flush schedule does not deadlock although the ranks of a stage wait for
    each other.

    Raises:
        ScheduleError: ranks deadlock; the message names them and their operations.
    """
    placement = schedule.placement
    if any(len(placement.holders(stage)) > 1 for stage in range(placement.stages)):
        play(schedule, lambda op: 0)


def play(schedule: Schedule, length: Callable[[Op], Time]) -> list[list[Time]]:
    """Simulate a schedule under the rules of this module and return, per rank, the ends of its
    operations. `length` returns the time of an operation; messages take no time.

    Raises:
        ScheduleError: ranks deadlock; the message names them and their operations.
    """
    lists = [schedule.rank_ops(rank) for rank in range(schedule.placement.ranks)]
    game = _Game(schedule)
    ends: list[list[Time]] = [[] for _ in lists]
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while len(ends[rank]) < len(ops):
                index = len(ends[rank])
                begin = game.begin(rank, index, ops[index])
                if begin is None:
                    break
                end = max([begin, *ends[rank][-1:]]) + length(ops[index])
                ends[rank].append(end)
                game.note(rank, ops[index], end)
                moved = True
    stuck = [
        f"rank {rank} at {ops[len(done)]}"
        for rank, (ops, done) in enumerate(zip(lists, ends, strict=True))
        if len(done) < len(ops)
    ]
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name}: the ranks of a stage synchronize after each update window, "
            f"and then {', '.join(stuck)} wait for each other; use more micro-batches per window"
        )
    return ends


class _Game:
    """State of the simulation: the outputs that exist so far, and when they were made."""

    def __init__(self, schedule: Schedule) -> None:
        assert schedule.updates is not None
        self._schedule, self._updates = schedule, schedule.updates
        placement = schedule.placement
        self._stages = placement.stages
        self._holders = [placement.holders(stage) for stage in range(placement.stages)]
        self._made: dict[tuple[Kind, int, int], Time] = {}
        """Ends of forwards and backwards, by kind, stage and micro-batch."""
        self._left: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        """Number of backwards that have not run yet, by rank, stage and update window."""
        for rank in range(placement.ranks):
            for op in schedule.rank_ops(rank):
                if op.kind == Kind.B:
                    self._left[rank, op.stage, self._window(op)] += 1
        self._through: dict[tuple[int, int, int], Time] = {}
        """End of the last backward, by rank, stage and update window."""
        self._updated: dict[tuple[int, int, int], Time] = {}
        """Ends of updates, by rank, stage and the version that the update makes."""
        self._last: dict[int, tuple[int, int]] = {}
        """Stage and update window of the latest synchronization with a stage's other ranks, by
        rank."""

    def _window(self, op: Op) -> int:
        return op.microbatch // self._updates.window

    def begin(self, rank: int, index: int, op: Op) -> Time | None:
        """Return the latest end of all that an operation waits for; None if any has not run."""
        needed: list[Time | None] = []
        if rank in self._last:
            stage, window = self._last[rank]
            needed += self._all_through(stage, window)
        if op.kind == Kind.U:
            waits = self._updates.waits
            for stage in range(self._stages) if waits else [op.stage]:
                needed += self._all_through(stage, op.microbatch)
        else:
            version = self._updates.reads[rank][index].version
            if version:
                holders = self._holders[op.stage]
                needed += [self._updated.get((each, op.stage, version)) for each in holders]
            other = op.stage - 1 if op.kind == Kind.F else op.stage + 1
            if 0 <= other < self._stages:
                needed.append(self._made.get((op.kind, other, op.microbatch)))
        known = [each for each in needed if each is not None]
        return max(known, default=0) if len(known) == len(needed) else None

    def _all_through(self, stage: int, window: int) -> list[Time | None]:
        return [self._through.get((rank, stage, window)) for rank in self._holders[stage]]

    def note(self, rank: int, op: Op, end: Time) -> None:
        """Record that an operation has ended at time `end`."""
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
