"""The proof of updates within a schedule: which weights there are, and who reads which.

Each stage has one update for every window, on each rank that has it, behind the window's last
gradient of the stage there. An operation reads a version that is made before it and that is kept
for it; of a micro-batch all operations at a stage read the same one, where the schedule promises
so. Backwards come window by window: so all weights are of one version when each rank is through
with a window, although no rank ever waits for that (the *cut* behind the window).
"""

from collections import defaultdict
from collections.abc import Sequence

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Read, Schedule, Updates
from megapipe.schedule.proof.violations import error


def check_updates(schedule: Schedule, updates: Updates) -> None:
    """Prove that the updates of a schedule are complete and in order, that each version is there
    for its readers, and that no more of them are kept than promised. The lists are known to be in
    order but for updates (:mod:`megapipe.schedule.proof.lists`).

    Raises:
        ScheduleError: the rank, the place in its list, the operation, the version, and what is
            wrong.
    """
    if updates.window < 1 or schedule.microbatches % updates.window:
        raise ScheduleError(
            f"schedule {schedule.name}: {schedule.microbatches} micro-batches are not a multiple "
            f"of the {updates.window} of a window"
        )
    if schedule.slices > 1 or schedule.sizes is not None:
        raise ScheduleError(
            f"schedule {schedule.name}: updates together with slices or micro-batches of unequal "
            "size are not supported"
        )
    if updates.kept is not None and len(updates.kept) != schedule.placement.ranks:
        raise ScheduleError(
            f"schedule {schedule.name}: {len(updates.kept)} limits of versions for "
            f"{schedule.placement.ranks} ranks; one per rank is needed"
        )
    for rank in range(schedule.placement.ranks):
        _Rank(schedule, updates, rank).check()


def weights_kept(ops: Sequence[Op], reads: Sequence[Read]) -> list[int]:
    """How many weights of an operation's stage a rank keeps while it runs, by operation.

    A version is kept from its update to its last reader, and the newest one always; predicted
    weights, and those that are moved back, from their first reader to their last.
    """
    last: dict[tuple[int, Read], int] = {}
    for place, (op, read) in enumerate(zip(ops, reads, strict=True)):
        if op.kind != Kind.U:
            last[op.stage, read] = place
    newest: defaultdict[int, Read] = defaultdict(lambda: Read(0))
    alive: defaultdict[int, set[Read]] = defaultdict(lambda: {Read(0)})
    counts = []
    for place, (op, read) in enumerate(zip(ops, reads, strict=True)):
        own = alive[op.stage]
        own.add(read)
        if op.kind == Kind.U:
            newest[op.stage] = read
        for old in list(own):
            if old != newest[op.stage] and last.get((op.stage, old), -1) < place:
                own.remove(old)
        counts.append(len(own))
    return counts


class _Rank:
    """The list of one rank, read from its beginning."""

    def __init__(self, schedule: Schedule, updates: Updates, rank: int) -> None:
        self._schedule, self._updates, self._rank = schedule, updates, rank
        self._ops = [op._replace(joined=False) for op in schedule.rank_ops(rank)]
        self._reads = updates.reads[rank]
        self._newest: dict[int, int] = dict.fromkeys(schedule.placement.stages_of(rank), 0)
        self._left = self._gradients()
        """By stage and window, the gradients that are still to come."""
        self._backward = 0
        """The window of the backwards so far."""
        self._forward: dict[tuple[int, int], Read] = {}
        """By stage and micro-batch, what its F has read."""

    def _gradients(self) -> dict[tuple[int, int], int]:
        count: defaultdict[tuple[int, int], int] = defaultdict(int)
        for op in self._ops:
            if op.kind in (Kind.B, Kind.W):
                count[op.stage, op.microbatch // self._updates.window] += 1
        return count

    def check(self) -> None:
        if len(self._reads) != len(self._ops):
            raise ScheduleError(
                f"schedule {self._schedule.name}: rank {self._rank}: {len(self._reads)} versions "
                f"for {len(self._ops)} operations; one for each is needed"
            )
        for index, (op, read) in enumerate(zip(self._ops, self._reads, strict=True)):
            if op.kind == Kind.U:
                self._update(index, op, read)
            else:
                self._work(index, op, read)
        windows = self._schedule.microbatches // self._updates.window
        for stage, made in self._newest.items():
            if made < windows:
                raise ScheduleError(
                    f"schedule {self._schedule.name}: rank {self._rank}: {Op(Kind.U, stage, made)} "
                    f"is missing from its list of {len(self._ops)} operations"
                )
        self._check_kept()

    def _update(self, index: int, op: Op, read: Read) -> None:
        window, made = op.microbatch, self._newest[op.stage]
        if window != made:
            what = (
                f"stage {op.stage} was updated for this window already"
                if window < made
                else f"it needs {op._replace(microbatch=made)} first"
            )
            raise self._error(index, what)
        if read != Read(window + 1):
            raise self._error(index, f"it makes version {window + 1}, not {read}")
        left = self._left[op.stage, window]
        if left:
            raise self._error(
                index, f"it stands before {left} of the window's gradients of stage {op.stage}"
            )
        self._newest[op.stage] = made + 1

    def _work(self, index: int, op: Op, read: Read) -> None:
        window, newest = op.microbatch // self._updates.window, self._newest[op.stage]
        if not 0 <= read.version <= newest:
            raise self._error(
                index,
                f"it reads version {read.version} of stage {op.stage}, which is not made; "
                f"the newest is {newest}",
            )
        if op.kind == Kind.F:
            self._forward[op.stage, op.microbatch] = read
            return
        if self._updates.follows and read != self._forward[op.stage, op.microbatch]:
            forward = self._forward[op.stage, op.microbatch]
            raise self._error(
                index,
                f"it reads version {read} of stage {op.stage}, {op._replace(kind=Kind.F)} has read "
                f"{forward}",
            )
        if op.kind in (Kind.B, Kind.I) and window < self._backward:
            raise self._error(
                index,
                f"it is of window {window}, and a backward of window {self._backward} comes before",
            )
        if op.kind in (Kind.B, Kind.I):
            self._backward = window
        if op.kind in (Kind.B, Kind.W):
            self._left[op.stage, window] -= 1

    def _check_kept(self) -> None:
        if self._updates.kept is None:
            return
        limit = self._updates.kept[self._rank]
        for index, count in enumerate(weights_kept(self._ops, self._reads)):
            if count > limit:
                raise self._error(
                    index,
                    f"{count} weights of stage {self._ops[index].stage} are kept from here, more "
                    f"than the {limit} promised for this rank",
                )

    def _error(self, index: int, what: str) -> ScheduleError:
        return error(self._schedule, self._rank, index, what)
