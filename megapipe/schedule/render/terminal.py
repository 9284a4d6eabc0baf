"""Drawings in rows of characters, for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.render.bars import (
    NAMES,
    Bar,
    OpBar,
    amount,
    bars,
    most_chunks,
    usual_length,
)
from megapipe.schedule.timing.simulate import Timeline, simulate


class TextSpan(NamedTuple):
    """Consecutive characters of a row that show one operation, or none."""

    words: str
    part: OpBar | None


@dataclass(frozen=True)
class TextDrawing:
    """A drawing with one row per rank, or two if ranks gather or reduce, ready to be coloured."""

    rows: tuple[tuple[TextSpan, ...], ...]
    legend: tuple[TextSpan, ...]
    summary: str
    chunks: int
    """Maximum number of stages of one direction on one rank."""

    def __str__(self) -> str:
        drawn = ["".join(run.words for run in row).rstrip() for row in (*self.rows, self.legend)]
        return "\n".join([*drawn, self.summary])


def text(drawn: Schedule | Timeline, *, width: int = 100) -> str:
    """Return a drawing as plain text; see :func:`draw_rows`."""
    return str(draw_rows(drawn, width=width))


def draw_rows(drawn: Schedule | Timeline, *, width: int = 100) -> TextDrawing:
    """Draw one row per rank for a terminal; a schedule is simulated at unit costs first.

    A cell is as wide as its operation is long. It shows kind, micro-batch (and slice), and with
    several chunks a letter for the chunk, as in ``F3b``; ``&`` stands between the operations of a
    joined pair. A second row of a rank shows when it gathers parameters and reduces gradients, with
    the stage: ``<3<<<`` and ``>3>>>``. If `width` columns are too few, all rows omit the same
    middle part of the time. No cell is wider than the drawing, so an operation that is a thousand
    times shorter than another one gets no column.
    """
    timeline = drawn if isinstance(drawn, Timeline) else simulate(drawn)
    rows = _draw_ends(timeline, width, width * _PER_COLUMN) or _draw_ends(timeline, width, None)
    assert rows is not None
    return rows


def _draw_ends(timeline: Timeline, width: int, most: int | None) -> TextDrawing | None:
    """Draw the first and last `most` operations per rank (None: all), or return None if more
    fit."""
    chunks = most_chunks(timeline.schedule.placement)
    chunked = chunks > 1
    rows = [list(bars(timeline, rank, most=most)) for rank in range(len(timeline.starts))]
    prefix = len(f"rank {len(rows) - 1} ")
    lengths = [
        (len(_label(bar, chunked)), bar.end - bar.start)
        for row in rows
        for bar in row
        if bar.end > bar.start
    ]
    room = max(width - prefix, 4 * max(label for label, _ in lengths))
    usual, origin = usual_length(rows), timeline.begin
    widest = room / max(length for _, length in lengths)
    for least, gap in ((0, 1), (usual, 1), (usual, 0)):
        fitted = [(label + gap) / length for label, length in lengths if length >= least]
        scale = float(min(max(fitted), widest))
        total = round(float(timeline.makespan) * scale)
        if total <= room:
            break
    if total <= room and most is not None and max(map(len, timeline.schedule.ops)) > 2 * most:
        return None
    half = (room - len(_CUT)) // 2
    windows = [(0, total)] if total <= room else [(0, half), (total - half, total)]
    drawn_rows: list[tuple[TextSpan, ...]] = []
    for rank, row in enumerate(rows):
        shown = (bar for bar in row if _is_within(bar, origin, scale, windows))
        placed = [_place(bar, origin, scale, gap, chunked) for bar in shown]
        drawn_rows.append(
            (TextSpan(f"rank {rank}".ljust(prefix), None), *_join(_cut(placed, windows, ".")))
        )
        if timeline.gathers or timeline.reductions:
            below = list(_place_collectives(timeline, rank, scale))
            drawn_rows.append((TextSpan(" " * prefix, None), *_join(_cut(below, windows, " "))))
    return TextDrawing(
        rows=tuple(drawn_rows),
        legend=tuple(_legend(rows, timeline, chunked, len(windows) > 1)),
        summary=_summary(timeline),
        chunks=chunks,
    )


_CUT = " ... "
_PER_COLUMN = 4
"""Number of operations per column that are read from each end of a rank's list. Each end gets half
of the columns at most, so more operations would have no room."""
GATHERED, REDUCED = "<", ">"
_Cell = tuple[str, OpBar | None]


class _Placed(NamedTuple):
    """A bar as cells of a row, one per column from `start` on."""

    start: int
    cells: list[_Cell]
    short: list[_Cell]
    """The cells without a label, for a bar that is only partly within the drawn columns."""


def _is_within(bar: Bar, origin: Time, scale: float, windows: Sequence[tuple[int, int]]) -> bool:
    """Whether a bar is on a column of `windows`, the ranges of columns that are drawn."""
    start, end = float(bar.start - origin) * scale, float(bar.end - origin) * scale
    return any(start < last + 1 and end > first - 1 for first, last in windows)


def _place(bar: Bar, origin: Time, scale: float, gap: int, chunked: bool) -> _Placed:
    start, end = (round(float(time - origin) * scale) for time in (bar.start, bar.end))
    room = end - start
    label = _label(bar, chunked)
    if len(label) > room:
        label = "&".join(part.op.kind.name for part in bar.parts)[:room]
    body = max(room - gap, len(label))
    owners = [bar.parts[len(bar.parts) * column // body] for column in range(body)]
    blank: list[_Cell] = [(" ", None)] * (room - body)
    return _Placed(
        start,
        [*zip(label.ljust(body, "-"), owners, strict=True), *blank],
        [*zip("-" * body, owners, strict=True), *blank],
    )


def _place_collectives(timeline: Timeline, rank: int, scale: float) -> Iterator[_Placed]:
    """Place the gathers and reductions of a rank, each at least one column wide."""
    for mark, intervals in ((GATHERED, timeline.gathers), (REDUCED, timeline.reductions)):
        for each in intervals:
            if each.rank == rank:
                times = (each.start - timeline.begin, each.end - timeline.begin)
                start, end = (round(float(time) * scale) for time in times)
                room = max(end - start, 1)
                label = f"{mark}{each.stage}" if len(f"{each.stage}") + 2 <= room else ""
                cells: list[_Cell] = [(character, None) for character in label.ljust(room, mark)]
                yield _Placed(start, cells, [(mark, None)] * room)


def _cut(row: list[_Placed], windows: list[tuple[int, int]], blank: str) -> Iterator[_Cell]:
    """Yield the cells of a row that are on the columns of `windows`. These are ranges of columns,
    in order and without overlap."""
    for number, (first, last) in enumerate(windows):
        if number:
            yield from ((character, None) for character in _CUT)
        cells: list[_Cell] = [(blank, None)] * (last - first)
        for start, whole, short in row:
            end = start + len(whole)
            drawn = whole if first <= start and end <= last else short
            for column in range(max(start, first), min(end, last)):
                cells[column - first] = drawn[column - start]
        yield from cells


def _join(cells: Iterable[_Cell]) -> Iterator[TextSpan]:
    for part, group in groupby(cells, key=lambda cell: cell[1]):
        yield TextSpan("".join(character for character, _ in group), part)


def _label(bar: Bar, chunked: bool) -> str:
    return "&".join(_part_label(part, chunked) for part in bar.parts)


def _part_label(part: OpBar, chunked: bool) -> str:
    letters = ascii_lowercase
    chunk = letters[part.chunk] if part.chunk < len(letters) else f".{part.chunk}"
    return f"{part.op.kind.name}{part.number}{chunk if chunked else ''}"


def _legend(
    rows: list[list[Bar]], timeline: Timeline, chunked: bool, cut: bool
) -> Iterator[TextSpan]:
    example: dict[Kind, OpBar] = {}
    for part in (part for row in rows for bar in row for part in bar.parts):
        example.setdefault(part.op.kind, part)
    for kind, part in sorted(example.items()):
        yield TextSpan(kind.name, part._replace(chunk=0))
        yield TextSpan(f" {NAMES[kind]}; ", None)
    sliced = timeline.schedule.slices > 1
    words = ["number: micro-batch.slice" if sliced else "number: micro-batch"]
    words += ["letter: chunk"] if chunked else []
    words += ["& as one"] if any(len(bar.parts) > 1 for row in rows for bar in row) else []
    words += [f"{GATHERED} gathers a stage"] if timeline.gathers else []
    words += [f"{REDUCED} reduces a stage"] if timeline.reductions else []
    words += ["... left out"] if cut else []
    yield TextSpan("; ".join([*words, ". idle"]), None)


def _summary(timeline: Timeline) -> str:
    bubbles = timeline.bubble_makespan, timeline.bubble_ideal, timeline.bubble_span
    makespan, ideal, span = (max(0.0, float(bubble)) for bubble in bubbles)  # 0 may round below
    return (
        f"time {amount(timeline.makespan)}; idle {makespan:.1%} of the makespan, {ideal:.1%} of "
        f"the ideal time, {span:.1%} of the longest rank span"
    )
