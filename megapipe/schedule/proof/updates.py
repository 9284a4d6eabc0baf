"""Proof of a no-flush schedule's updates: every weight version exists when an operation reads it.

Each stage has one update per update window, on each of its holders, after the holder's last
gradient of the stage in the window. An operation reads a version that was made before and is still
kept. All operations of a micro-batch at a stage read the same version, if the schedule promises so.
On a rank, all backwards of a window precede those of the next window. So the lists can be *cut*
after each window: every rank has finished the window there, and all stages have the same version,
although no rank waits for others.
"""

from collections import defaultdict
from collections.abc import Sequence

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Read, Schedule, Updates
from megapipe.schedule.proof.violations import error


def check_updates(schedule: Schedule, updates: Updates) -> None:
    """Prove that the updates of a schedule are complete and in order, that each version exists for
    its readers, and that a rank keeps at most the promised number of versions. The lists must have
    passed :mod:`megapipe.schedule.proof.rank_lists`, which checks everything but updates.

    Raises:
        ScheduleError: it names rank, index in the list, operation, version and reason.
    """
    if updates.window < 1 or schedule.microbatches % updates.window:
        raise ScheduleError(
            f"schedule {schedule.name}: {schedule.microbatches} micro-batches are not a multiple "
            f"of the {updates.window} per update window"
        )
    if schedule.slices > 1 or schedule.sizes is not None:
        raise ScheduleError(
            f"schedule {schedule.name}: updates together with slices or micro-batches of unequal "
            "size are not supported"
        )
    if updates.kept is not None and len(updates.kept) != schedule.placement.ranks:
        raise ScheduleError(
            f"schedule {schedule.name}: `kept` has {len(updates.kept)} numbers for "
            f"{schedule.placement.ranks} ranks; one per rank is needed"
        )
    for rank in range(schedule.placement.ranks):
        _Rank(schedule, updates, rank).check()


def weights_kept(ops: Sequence[Op], reads: Sequence[Read]) -> list[int]:
    """Count, for each operation of a rank, the versions of the stage's weights kept while it runs.

    A version is kept from its update until its last reader has run and a newer version exists.
    Predicted or moved-back weights are kept from their first reader to their last.
    """
    last: dict[tuple[int, Read], int] = {}
    for index, (op, read) in enumerate(zip(ops, reads, strict=True)):
        if op.kind != Kind.U:
            last[op.stage, read] = index
    newest: defaultdict[int, Read] = defaultdict(lambda: Read(0))
    alive: defaultdict[int, set[Read]] = defaultdict(lambda: {Read(0)})
    counts = []
    for index, (op, read) in enumerate(zip(ops, reads, strict=True)):
        own = alive[op.stage]
        own.add(read)
        if op.kind == Kind.U:
            newest[op.stage] = read
        for old in list(own):
            if old != newest[op.stage] and last.get((op.stage, old), -1) < index:
                own.remove(old)
        counts.append(len(own))
    return counts


class _Rank:
    """Checks of one rank's list, read from its beginning."""

    def __init__(self, schedule: Schedule, updates: Updates, rank: int) -> None:
        self._schedule, self._updates, self._rank = schedule, updates, rank
        self._ops = [op._replace(joined=False) for op in schedule.rank_ops(rank)]
        self._reads = updates.reads[rank]
        self._newest: dict[int, int] = dict.fromkeys(schedule.placement.stages_of(rank), 0)
        self._left = self._gradients()
        """Number of weight gradients later in the list, by stage and update window."""
        self._backward = 0
        """Update window of the latest backward."""
        self._forward: dict[tuple[int, int], Read] = {}
        """Weight versions that each F has read, by stage and micro-batch."""

    def _gradients(self) -> dict[tuple[int, int], int]:
        count: defaultdict[tuple[int, int], int] = defaultdict(int)
        for op in self._ops:
            if op.kind in (Kind.B, Kind.W):
                count[op.stage, op.microbatch // self._updates.window] += 1
        return count

    def check(self) -> None:
        if len(self._reads) != len(self._ops):
            raise ScheduleError(
                f"schedule {self._schedule.name}: rank {self._rank}: `reads` has "
                f"{len(self._reads)} versions for {len(self._ops)} operations; give one for each"
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
                index, f"it comes before {left} of the window's gradients of stage {op.stage}"
            )
        self._newest[op.stage] = made + 1

    def _work(self, index: int, op: Op, read: Read) -> None:
        window, newest = op.microbatch // self._updates.window, self._newest[op.stage]
        if not 0 <= read.version <= newest:
            raise self._error(
                index,
                f"it reads version {read.version} of stage {op.stage}, which does not exist yet; "
                f"the newest is {newest}",
            )
        if op.kind == Kind.F:
            self._forward[op.stage, op.microbatch] = read
            return
        if self._updates.follows and read != self._forward[op.stage, op.microbatch]:
            forward = self._forward[op.stage, op.microbatch]
            raise self._error(
                index,
                f"it reads version {read} of stage {op.stage}, but {op._replace(kind=Kind.F)} has "
                f"read {forward}",
            )
        if op.kind in (Kind.B, Kind.I) and window < self._backward:
            raise self._error(
                index,
                f"it is of window {window}, but a backward of window {self._backward} comes before "
                "it",
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
                    f"from this operation on, the rank keeps {count} versions of stage "
                    f"{self._ops[index].stage}, more than the {limit} promised in `kept`",
                )

    def _error(self, index: int, what: str) -> ScheduleError:
        return error(self._schedule, self._rank, index, what)
