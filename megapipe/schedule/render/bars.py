"""A timeline as bars, from which every drawing of a schedule is made."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Kind, Op, Schedule, unpack
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.simulate import Timeline

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recomputation",
    Kind.U: "update",
}


class OpBar(NamedTuple):
    """An operation, with what a drawing shows of it."""

    op: Op
    chunk: int
    """Model chunk: index of the operation's stage among the rank's stages of this direction."""
    direction: int
    number: str
    """Label: the micro-batch; with slices also the slice, as in ``3.1``; with stale weights also
    the version that a forward reads, as in ``5@2``."""


class Bar(NamedTuple):
    """One bar of a rank: one operation, or a joined pair."""

    start: Time
    end: Time
    parts: tuple[OpBar, ...]


def bars(timeline: Timeline, rank: int, *, most: int | None = None) -> Iterator[Bar]:
    """Yield the bars of a rank in order. If the rank has more than twice `most` operations, yield
    only those of the first `most` and the last `most` operations."""
    schedule = timeline.schedule
    chunks = _chunk_of(schedule.placement, rank)
    first: OpBar | None = None
    updates, codes, starts = schedule.updates, schedule.ops[rank], timeline.starts[rank]
    for index in _ends(codes, most):
        op, start, end = unpack(codes[index]), starts[index], timeline.ends[rank][index]
        read = None if updates is None else updates.reads[rank][index]
        direction = _direction(schedule, op, chunks)
        number = f"{op.microbatch}.{op.slice}" if schedule.slices > 1 else f"{op.microbatch}"
        if read is not None and op.kind == Kind.F:
            number += f"@{read}"
        part = OpBar(op, chunks[direction, op.stage], direction, number)
        if op.joined:
            first = part
        else:
            yield Bar(start, end, (part,) if first is None else (first, part))
            first = None


def _ends(codes: Sequence[int], most: int | None) -> Iterable[int]:
    """Return indices of the first and last `most` operations (None: all); split no joined pair."""
    indices = range(len(codes))
    if most is None or len(codes) <= 2 * most:
        return indices
    head, tail = most, len(codes) - most
    head, tail = (index + unpack(codes[index - 1]).joined for index in (head, tail))
    return chain(indices[:head], indices[tail:])


def _direction(schedule: Schedule, op: Op, chunks: dict[tuple[int, int], int]) -> int:
    """Return the micro-batch's direction; for an update, which has no micro-batch, the first
    direction in which the rank has the stage."""
    if op.kind != Kind.U:
        return schedule.direction_of(op.microbatch)
    return min(direction for direction, stage in chunks if stage == op.stage)


def most_chunks(placement: Placement) -> int:
    """Return the maximum number of stages of one direction on one rank."""
    return 1 + max(max(_chunk_of(placement, rank).values()) for rank in range(placement.ranks))


def usual_length(rows: list[list[Bar]]) -> Time:
    """Return the lower median of all bar lengths above zero; 1 if no bar has such a length."""
    lengths = sorted(bar.end - bar.start for row in rows for bar in row if bar.end > bar.start)
    return lengths[(len(lengths) - 1) // 2] if lengths else 1


def amount(value: Time) -> str:
    """Format a number for a reader, with six digits at most."""
    return f"{float(value):g}"


def _chunk_of(placement: Placement, rank: int) -> dict[tuple[int, int], int]:
    """Map each (direction, stage) of a rank to its model chunk: its index within the direction."""
    return {
        (direction, stage): chunk
        for direction in range(len(placement.table))
        for chunk, stage in enumerate(placement.direction_stages(rank, direction))
    }
