"""No-flush schedules: an order combined with a version policy. A schedule is given by the
operations of one update window, and repeats them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from megapipe.errors import ScheduleError
from megapipe.schedule.async_schedules.orders import Order
from megapipe.schedule.async_schedules.policies import Lists, VersionPolicy
from megapipe.schedule.ir import Kind, Op, Read, Schedule, Updates, pack, packed
from megapipe.schedule.placement import Placement
from megapipe.schedule.proof.updates import weights_kept

Step = tuple[Op, Read]
"""An operation and the weights that it reads."""


@dataclass(frozen=True)
class AsyncSchedule:
    """A no-flush schedule, given by one segment (each rank's operations for one update window) that
    repeats. Micro-batch 0 is the first micro-batch of the segment's window; version 0 is the weight
    version that the window's update changes. The micro-batch field of a U is n if its gradients are
    of the n-th window before the segment's window."""

    name: str
    placement: Placement
    microbatches: int
    """Number of micro-batches in an update window."""
    policy: VersionPolicy
    fill: tuple[tuple[Op, ...], ...]
    """Forwards of each rank that are in flight when a segment begins; an empty pipeline runs them
    first."""
    fill_reads: tuple[tuple[Read, ...], ...]
    segment: tuple[tuple[Op, ...], ...]
    """Operations of each rank for one update window."""
    segment_reads: tuple[tuple[Read, ...], ...]
    """Weights that each operation of the segment reads; for a U, the version that it makes."""
    kept: tuple[int, ...]
    """Maximum number of versions and predictions of one stage's weights that each rank keeps."""

    @property
    def ahead(self) -> int:
        """Maximum number of update windows by which a forward is ahead of its segment's window."""
        return _ahead((*self.fill, *self.segment), self.microbatches)

    def windows_of(self, schedule: Schedule) -> int:
        """Return the number of update windows in a schedule that :func:`finite` has built."""
        return schedule.microbatches // self.microbatches


def stream(order: Order, policy: VersionPolicy) -> AsyncSchedule:
    """Combine an order and a version policy into a no-flush schedule.

    Raises:
        ScheduleError: the policy does not support the order or its window size, or operations do
            not read the same versions, relative to their update window, in all windows.
    """
    if order.name not in policy.orders:
        raise ScheduleError(
            f"weights {policy.name} do not work with schedule {order.name}; they work with "
            f"{', '.join(policy.orders)}"
        )
    window = order.microbatches
    if policy.late and order.ahead > window:
        raise ScheduleError(
            f"weights {policy.name}: {order.ahead} micro-batches are in flight ahead of an update "
            f"window, so a window needs at least as many, not {window}"
        )
    segment = tuple(_with_updates(ops, window, late=policy.late) for ops in order.segment)
    ahead = _ahead((*order.fill, *segment), window)
    steady = 2 * ahead + 2  # from this window on, all must read equal relative versions
    lists = [
        _unrolled(*parts, window, 2 * steady) for parts in zip(order.fill, segment, strict=True)
    ]
    known = Lists(lists, window)
    absolute = [{op: _absolute(known, policy, op) for op in ops} for ops in lists]

    def relative(rank: int, ops: tuple[Op, ...], number: int = steady) -> tuple[Read, ...]:
        """Return the weights that the operations `ops` of a rank read in update window `number`,
        relative to the version that the window's update changes."""
        reads = (absolute[rank][moved(op, number, window)] for op in ops)
        return tuple(read._replace(version=read.version - number) for read in reads)

    segment_reads = tuple(relative(rank, ops) for rank, ops in enumerate(segment))
    for rank, (ops, wanted) in enumerate(zip(segment, segment_reads, strict=True)):
        for number in range(steady + 1, 2 * steady - ahead):
            _check_alike(policy, rank, ops, wanted, relative(rank, ops, number), number - steady)
    kept = [max(weights_kept(ops, [*of.values()])) for ops, of in zip(lists, absolute, strict=True)]
    return AsyncSchedule(
        name=f"{order.name}, {policy.name}",
        placement=order.placement,
        microbatches=window,
        policy=policy,
        fill=order.fill,
        fill_reads=tuple(relative(rank, ops) for rank, ops in enumerate(order.fill)),
        segment=segment,
        segment_reads=segment_reads,
        kept=tuple(kept),
    )


def _check_alike(
    policy: VersionPolicy,
    rank: int,
    ops: tuple[Op, ...],
    wanted: tuple[Read, ...],
    found: tuple[Read, ...],
    later: int,
) -> None:
    """Raise ScheduleError unless `found`, the reads `later` windows later, equal `wanted`."""
    for index, (op, first, second) in enumerate(zip(ops, wanted, found, strict=True)):
        if first != second:
            raise ScheduleError(
                f"weights {policy.name}: rank {rank}, op {index} of an update window ({op}): it "
                f"reads version {first} of stage {op.stage}, relative to the one that its window "
                f"changes, but version {second} {later} window{'' if later == 1 else 's'} later; "
                "it must read the same relative version in all windows"
            )


def finite(stream: AsyncSchedule, windows: int) -> Schedule:
    """Build a schedule of the first `windows` update windows: the fill, a segment per window, and
    the updates still pending at the end. Forwards of later windows are omitted.

    Raises:
        ScheduleError: `windows` is below 1.
    """
    if windows < 1:
        raise ScheduleError(f"schedule {stream.name}: windows must be at least 1, not {windows}")
    lists = [
        [
            (moved(op, window, stream.microbatches), _at(read, window))
            for window, steps in rank_parts
            for op, read in steps
        ]
        for rank_parts in parts(stream, windows)
    ]
    policy, turns = stream.policy, len(stream.placement.table)
    microbatches = windows * stream.microbatches
    return Schedule(
        name=stream.name,
        placement=stream.placement,
        microbatches=microbatches,
        direction=tuple(k % turns for k in range(microbatches)) if turns > 1 else None,
        ops=tuple(packed(pack(*op) for op, _ in steps) for steps in lists),
        updates=Updates(
            window=stream.microbatches,
            reads=tuple(tuple(read for _, read in steps) for steps in lists),
            waits=policy.waits,
            follows=policy.follows,
            kept=stream.kept,
        ),
    )


def parts(stream: AsyncSchedule, windows: int) -> list[list[tuple[int, list[Step]]]]:
    """Return, for each rank, the parts of a run of `windows` update windows: the fill, a segment
    for each window, and the updates that are still pending at the end.

    Each part comes with the window from which its micro-batches and versions are counted. A part
    omits operations of windows before the first window or after the last window.
    """
    fills = map(zip, stream.fill, stream.fill_reads)
    segments = map(zip, stream.segment, stream.segment_reads)
    return [
        list(_in_windows(list(fill), list(segment), stream.microbatches, windows))
        for fill, segment in zip(fills, segments, strict=True)
    ]


def versions_kept(stream: AsyncSchedule) -> dict[int, int]:
    """Return, for each stage, how many weight versions exist at once: from the oldest version that
    an operation reads to the newest. A pending update counts from the beginning of the segment, as
    it can be made that early."""
    kept: defaultdict[int, int] = defaultdict(lambda: 1)
    for ops, reads in zip(stream.segment, stream.segment_reads, strict=True):
        newest: defaultdict[int, int] = defaultdict(int)
        for op, read in zip(ops, reads, strict=True):
            if op.kind == Kind.U:
                newest[op.stage] = max(newest[op.stage], read.version)
            elif not read.ahead:
                age = newest[op.stage] - read.version
                kept[op.stage] = max(kept[op.stage], age + 1)
        for stage in newest:
            kept[stage] = max(kept[stage], 1)
    return dict(kept)


def mean_staleness(stream: AsyncSchedule) -> dict[int, Fraction]:
    """Return, for each stage, the mean staleness of its forwards in the steady state: the updates
    by which the version that a forward reads is behind the version that its window's update
    changes. Prediction is not counted."""
    behind: defaultdict[int, list[int]] = defaultdict(list)
    for ops, reads in zip(stream.segment, stream.segment_reads, strict=True):
        for op, read in zip(ops, reads, strict=True):
            if op.kind == Kind.F:
                behind[op.stage].append(op.microbatch // stream.microbatches - read.version)
    return {stage: Fraction(sum(counts), len(counts)) for stage, counts in behind.items()}


def moved_back(stream: AsyncSchedule) -> dict[int, Fraction]:
    """Return, by stage, the number of updates by which backwards move the weights back before they
    read them. Stages without such backwards are omitted."""
    return {
        op.stage: -read.ahead
        for ops, reads in zip(stream.segment, stream.segment_reads, strict=True)
        for op, read in zip(ops, reads, strict=True)
        if read.ahead < 0
    }


def predictions_kept(stream: AsyncSchedule) -> dict[int, int]:
    """Return, by stage, the number of weights kept besides versions: one if forwards read predicted
    weights, and one more if backwards read predicted or moved-back weights. Stages without such
    weights are omitted."""
    kinds: defaultdict[int, set[Kind]] = defaultdict(set)
    for ops, reads in zip(stream.segment, stream.segment_reads, strict=True):
        for op, read in zip(ops, reads, strict=True):
            if read.ahead:
                kinds[op.stage].add(op.kind)
    return {stage: len(found) for stage, found in kinds.items()}


def _ahead(lists: Iterable[Iterable[Op]], window: int) -> int:
    return max(op.microbatch for ops in lists for op in ops) // window


def _with_updates(ops: tuple[Op, ...], window: int, *, late: bool) -> tuple[Op, ...]:
    """Insert an update of each stage into a rank's segment: after the stage's last backward or, if
    `late`, as late as possible in the next window's segment (:attr:`VersionPolicy.late`)."""
    result = list(ops)
    for stage in sorted({op.stage for op in ops}):
        last = max(n for n, op in enumerate(result) if op.kind == Kind.B and op.stage == stage)
        if not late:
            result.insert(last + 1, Op(Kind.U, stage, 0))
            continue
        readers = (
            n
            for n, op in enumerate(result)
            if op.kind == Kind.F and op.stage == stage and op.microbatch >= window
        )
        result.insert(min(next(readers, last), last), Op(Kind.U, stage, 1))
    return tuple(result)


def moved(op: Op, window: int, size: int) -> Op:
    """Return a segment's operation with its micro-batch renumbered for update window `window`. Each
    window has `size` micro-batches."""
    if op.kind == Kind.U:
        return op._replace(microbatch=window - op.microbatch)
    return op._replace(microbatch=window * size + op.microbatch)


def _unrolled(fill: Iterable[Op], segment: Iterable[Op], size: int, windows: int) -> list[Op]:
    """Return a rank's operations in the first `windows` update windows."""
    nothing = Read(0)
    given = [(op, nothing) for op in fill], [(op, nothing) for op in segment]
    return [
        moved(op, window, size)
        for window, steps in _in_windows(*given, size, windows)
        for op, _ in steps
    ]


def _in_windows(
    fill: list[Step], segment: list[Step], size: int, windows: int
) -> Iterator[tuple[int, list[Step]]]:
    """Yield the parts of one rank; :func:`parts` describes them."""
    yield 0, [step for step in fill if step[0].microbatch < size * windows]
    for window in range(windows + 1):
        left = range(-window * size, (windows - window) * size)
        updated = range(window - windows + 1, window + 1)  # 0 is the window itself
        yield (
            window,
            [
                step
                for step in segment
                if step[0].microbatch in (updated if step[0].kind == Kind.U else left)
            ],
        )


def _at(read: Read, window: int) -> Read:
    """Convert a version relative to `window` into an absolute version, which is at least 0."""
    return read._replace(version=max(0, window + read.version))


def _absolute(lists: Lists, policy: VersionPolicy, op: Op) -> Read:
    """Return the weights that an operation reads; for an update, the version that it makes."""
    return Read(op.microbatch + 1) if op.kind == Kind.U else policy.reads(lists, op)
