"""A timeline as bars, from which every drawing of a schedule is made."""

from collections.abc import Iterator
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Kind, Op, unpack
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.simulate import Timeline

NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.R: "recomputation",
}


class Part(NamedTuple):
    """One operation, and where it runs on its rank."""

    op: Op
    chunk: int
    """Position of the operation's stage among the rank's stages of this direction."""
    direction: int
    number: str
    """The micro-batch, and where sequences are cut the slice, as in ``3.1``."""


class Bar(NamedTuple):
    """One bar of a rank: one operation, or a joined pair."""

    start: Time
    end: Time
    parts: tuple[Part, ...]


def bars(timeline: Timeline, rank: int) -> Iterator[Bar]:
    """The bars of a rank, in order."""
    schedule = timeline.schedule
    chunks = _chunk_of(schedule.placement, rank)
    first: Part | None = None
    for code, start, end in zip(
        schedule.ops[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        op = unpack(code)
        direction = schedule.direction_of(op.microbatch)
        number = f"{op.microbatch}.{op.slice}" if schedule.slices > 1 else f"{op.microbatch}"
        part = Part(op, chunks[direction, op.stage], direction, number)
        if op.joined:
            first = part
        else:
            yield Bar(start, end, (part,) if first is None else (first, part))
            first = None


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
