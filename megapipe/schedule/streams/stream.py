"""An order and a policy together: operations and versions of a window, for all windows."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Read, Schedule, Updates, pack, packed
from megapipe.schedule.placement import Placement
from megapipe.schedule.proof.updates import weights_kept
from megapipe.schedule.streams.orders import Order
from megapipe.schedule.streams.policies import Lists, VersionPolicy

Step = tuple[Op, Read]
"""An operation, and the weights that it reads."""


@dataclass(frozen=True)
class AsyncSchedule:
    """A pipeline without a flush. Micro-batches are counted from the first one of the segment's
    window, and versions from the version that the window will change; a U names how many windows
    before this one are updated by it, 0 for this one."""

    name: str
    placement: Placement
    microbatches: int
    """Of a window."""
    policy: VersionPolicy
    fill: tuple[tuple[Op, ...], ...]
    """Per rank, the forwards that are in flight at the cut before the segment."""
    fill_reads: tuple[tuple[Read, ...], ...]
    segment: tuple[tuple[Op, ...], ...]
    """Per rank, what it does from one cut to the next."""
    segment_reads: tuple[tuple[Read, ...], ...]
    """The weights that each operation of the segment reads; of a U the version that it makes."""
    kept: tuple[int, ...]
    """Per rank, the most weights of a stage that are kept at once (see Updates)."""

    @property
    def ahead(self) -> int:
        """How many windows a forward may be ahead of the backwards beside it."""
        return _ahead((*self.fill, *self.segment), self.microbatches)

    def windows_of(self, schedule: Schedule) -> int:
        """How many windows a :func:`finite` schedule of it has."""
        return schedule.microbatches // self.microbatches


def stream(order: Order, policy: VersionPolicy) -> AsyncSchedule:
    """The stream of an order under a policy.

    Raises:
        ScheduleError: they do not go together, the windows are too short for them, or the policy
            does not say the same of all windows.
    """
    if order.name not in policy.orders:
        raise ScheduleError(
            f"weights {policy.name} do not go with schedule {order.name}, but with "
            f"{' and '.join(policy.orders)}"
        )
    window = order.microbatches
    if policy.late and order.ahead > window:
        raise ScheduleError(
            f"weights {policy.name}: {order.ahead} micro-batches are in flight ahead of a window, "
            f"so it needs at least as many, not {window}"
        )
    segment = tuple(_with_updates(ops, window, late=policy.late) for ops in order.segment)
    ahead = _ahead((*order.fill, *segment), window)
    steady = 2 * ahead + 2  # all windows from here on are to be alike
    lists = [
        _unrolled(*parts, window, 2 * steady) for parts in zip(order.fill, segment, strict=True)
    ]
    known = Lists(lists, window)
    absolute = [{op: _absolute(known, policy, op) for op in ops} for ops in lists]

    def relative(rank: int, ops: tuple[Op, ...], number: int = steady) -> tuple[Read, ...]:
        """The weights that operations read in a window, counted from those that it changes."""
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
    """Refuse a policy by which a segment does not read the same some windows `later`."""
    for place, (op, first, second) in enumerate(zip(ops, wanted, found, strict=True)):
        if first != second:
            raise ScheduleError(
                f"weights {policy.name}: rank {rank}, op {place} of a window ({op}): it reads "
                f"version {first} of stage {op.stage}, counted from the one that its window "
                f"changes, and {second} {later} {'window' if later == 1 else 'windows'} later; "
                "all windows are to be alike"
            )


def finite(stream: AsyncSchedule, windows: int) -> Schedule:
    """The first windows of a stream as a schedule: a fill, as many segments, whose forwards run out
    at the end, and the updates that are still pending then.

    Raises:
        ScheduleError: less than one window.
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
    """The first windows of a stream from cut to cut: for each rank the fill, a segment for each
    window, and the updates that are still pending then.

    Each part comes with the window from which its micro-batches and versions are counted; a part is
    shorter than the stream's where it lies before the first window or behind the last.
    """
    fills = map(zip, stream.fill, stream.fill_reads)
    segments = map(zip, stream.segment, stream.segment_reads)
    return [
        list(_in_windows(list(fill), list(segment), stream.microbatches, windows))
        for fill, segment in zip(fills, segments, strict=True)
    ]


def versions_kept(stream: AsyncSchedule) -> dict[int, int]:
    """By stage, the most versions from the oldest that an operation reads to the newest, also where
    updates that are pending at a cut are made there."""
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
    """By stage, by how many updates forwards are behind the version that their window changes, on
    average in the steady state. What is predicted ahead does not count."""
    behind: defaultdict[int, list[int]] = defaultdict(list)
    for ops, reads in zip(stream.segment, stream.segment_reads, strict=True):
        for op, read in zip(ops, reads, strict=True):
            if op.kind == Kind.F:
                behind[op.stage].append(op.microbatch // stream.microbatches - read.version)
    return {stage: Fraction(sum(counts), len(counts)) for stage, counts in behind.items()}


def moved_back(stream: AsyncSchedule) -> dict[int, Fraction]:
    """By how many updates the backwards of a stage move the weights back that they read, by stage,
    where they do."""
    return {
        op.stage: -read.ahead
        for ops, reads in zip(stream.segment, stream.segment_reads, strict=True)
        for op, read in zip(ops, reads, strict=True)
        if read.ahead < 0
    }


def predictions_kept(stream: AsyncSchedule) -> dict[int, int]:
    """By stage, the predicted and moved back weights that are kept beside versions: those that
    forwards read, and those that backwards read."""
    kinds: defaultdict[int, set[Kind]] = defaultdict(set)
    for ops, reads in zip(stream.segment, stream.segment_reads, strict=True):
        for op, read in zip(ops, reads, strict=True):
            if read.ahead:
                kinds[op.stage].add(op.kind)
    return {stage: len(found) for stage, found in kinds.items()}


def _ahead(lists: Iterable[Iterable[Op]], window: int) -> int:
    return max(op.microbatch for ops in lists for op in ops) // window


def _with_updates(ops: tuple[Op, ...], window: int, *, late: bool) -> tuple[Op, ...]:
    """A segment with an update of each stage in it."""
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
    """An operation of a segment, as it is in the segment of a window of `size` micro-batches."""
    if op.kind == Kind.U:
        return op._replace(microbatch=window - op.microbatch)
    return op._replace(microbatch=window * size + op.microbatch)


def _unrolled(fill: Iterable[Op], segment: Iterable[Op], size: int, windows: int) -> list[Op]:
    """The list of a rank for as many windows."""
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
    """The parts of a rank, see :func:`parts`."""
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
    """A version that is counted from a window's: no stage has one below 0."""
    return read._replace(version=max(0, window + read.version))


def _absolute(lists: Lists, policy: VersionPolicy, op: Op) -> Read:
    """The weights that an operation reads; of an update the version that it makes."""
    return Read(op.microbatch + 1) if op.kind == Kind.U else policy.reads(lists, op)
