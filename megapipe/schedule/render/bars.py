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
    """One operation, and where it runs on its rank."""

    op: Op
    chunk: int
    """Position of the operation's stage among the rank's stages of this direction."""
    direction: int
    number: str
    """The micro-batch, and where sequences are cut the slice, as in ``3.1``; where weights are
    stale also the version that a forward reads, as in ``5@2``."""


class Bar(NamedTuple):
    """One bar of a rank: one operation, or a joined pair."""

    start: Time
    end: Time
    parts: tuple[OpBar, ...]


def bars(timeline: Timeline, rank: int, *, most: int | None = None) -> Iterator[Bar]:
    """The bars of a rank, in order; where it has more operations than twice `most`, those of so
    many at the beginning and at the end."""
    schedule = timeline.schedule
    chunks = _chunk_of(schedule.placement, rank)
    first: OpBar | None = None
    updates, codes, starts = schedule.updates, schedule.ops[rank], timeline.starts[rank]
    for place in _ends(codes, most):
        op, start, end = unpack(codes[place]), starts[place], timeline.ends[rank][place]
        read = None if updates is None else updates.reads[rank][place]
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
    """Places of the first and the last operations, without half a pair."""
    places = range(len(codes))
    if most is None or len(codes) <= 2 * most:
        return places
    head, tail = most, len(codes) - most
    head, tail = (place + unpack(codes[place - 1]).joined for place in (head, tail))
    return chain(places[:head], places[tail:])


def _direction(schedule: Schedule, op: Op, chunks: dict[tuple[int, int], int]) -> int:
    """That of the micro-batch; of an update, which is of all, the first in which the rank has the
    stage."""
    if op.kind != Kind.U:
        return schedule.direction_of(op.microbatch)
    return min(direction for direction, stage in chunks if stage == op.stage)


def most_chunks(placement: Placement) -> int:
    """The most stages of one direction on one rank."""
    return 1 + max(max(_chunk_of(placement, rank).values()) for rank in range(placement.ranks))


def usual_length(rows: list[list[Bar]]) -> Time:
    """The lower median of the bars' lengths above zero; 1 if there are none."""
    lengths = sorted(bar.end - bar.start for row in rows for bar in row if bar.end > bar.start)
    return lengths[(len(lengths) - 1) // 2] if lengths else 1


def amount(value: Time) -> str:
    """A number for a reader, with six digits at most."""
    return f"{float(value):g}"


def _chunk_of(placement: Placement, rank: int) -> dict[tuple[int, int], int]:
    """(direction, stage) -> chunk, of what a rank holds."""
    return {
        (direction, stage): chunk
        for direction, row in enumerate(placement.table)
        for chunk, stage in enumerate(stage for stage, at in enumerate(row) if at == rank)
    }
