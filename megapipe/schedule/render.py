"""Drawings of a schedule in time: plain text for a terminal, SVG for a page."""

from collections.abc import Iterator
from string import ascii_lowercase
from typing import NamedTuple
from xml.sax.saxutils import escape

from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Kind, Schedule, unpack
from megapipe.schedule.simulate import Timeline, simulate

_NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
}
_COLOURS = {  # of the first chunk; later chunks are paler
    Kind.F: (106, 153, 214),
    Kind.B: (224, 133, 98),
    Kind.I: (88, 174, 146),
    Kind.W: (232, 190, 92),
}
_FONT = "font-family='Helvetica, Arial, sans-serif'"


class _Box(NamedTuple):
    """One operation, ready to be drawn."""

    kind: Kind
    microbatch: int
    chunk: int
    start: Time
    end: Time


def text(drawn: Schedule | Timeline, *, width: int = 100) -> str:
    """A drawing of one row per rank for a terminal; a schedule is timed at unit costs first.

    A cell is as wide as its operation is long: kind, micro-batch, and with several chunks a
    letter for the chunk, as in ``F3b``. What does not fit into width columns is left out in the
    middle of the time, alike in all rows.
    """
    timeline = drawn if isinstance(drawn, Timeline) else simulate(drawn)
    chunked = _chunks(timeline) > 1
    rows = [list(_boxes(timeline, rank)) for rank in range(len(timeline.starts))]
    prefix = len(f"rank {len(rows) - 1} ")
    longest = max(len(_label(box, chunked)) for row in rows for box in row)
    room = max(width - prefix, 4 * longest)
    usual = _usual_length(rows)
    for gap in (1, 0):
        scale = (longest + gap) / usual
        total = round(timeline.makespan * scale)
        if total <= room:
            break
    half = (room - 5) // 2
    windows = [(0, total)] if total <= room else [(0, half), (total - half, total)]
    lines = [
        f"rank {rank}".ljust(prefix)
        + " ... ".join(_row(row, window, scale, gap, chunked) for window in windows).rstrip()
        for rank, row in enumerate(rows)
    ]
    kinds = sorted({box.kind for row in rows for box in row})
    legend = [f"{kind.name} {_NAMES[kind]}" for kind in kinds] + ["number: micro-batch"]
    legend += ["letter: chunk"] if chunked else []
    legend += ["... left out"] if len(windows) > 1 else []
    return "\n".join([*lines, "; ".join([*legend, ". idle"]), _summary(timeline)])


def svg(drawn: Schedule | Timeline) -> str:
    """A drawing as one SVG document; a schedule is timed at unit costs first."""
    timeline = drawn if isinstance(drawn, Timeline) else simulate(drawn)
    schedule, chunks = timeline.schedule, _chunks(timeline)
    rows = [list(_boxes(timeline, rank)) for rank in range(len(timeline.starts))]
    makespan = float(timeline.makespan)
    scale = min(26 / _usual_length(rows), 1600 / makespan)
    left, top, pitch, height = 64, 40, 30, 26
    plot, bottom = makespan * scale, top + pitch * len(rows)
    kinds = sorted({box.kind for row in rows for box in row})
    swatches = [(kind, chunk) for kind in kinds for chunk in range(chunks)]
    title = (
        f"{schedule.name}: {schedule.placement.ranks} ranks, "
        f"{schedule.microbatches} micro-batches"
        + (f", {chunks} chunks" if chunks > 1 else "")
        + f"; idle {float(timeline.bubble_makespan):.1%} of the makespan"
    )
    legend_width = 70 + sum(38 + 6.2 * len(_swatch_name(*swatch, chunks)) for swatch in swatches)
    total_width = left + max(plot + 16, legend_width, 7.5 * len(title))
    total_height = bottom + 58
    sizes = (_number(total_width), _number(total_height))
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{1}' "
        "viewBox='0 0 {0} {1}' {2}>".format(*sizes, _FONT),
        "<rect width='100%' height='100%' fill='white'/>",
        _text(left, 22, title, size=14, anchor="start"),
    ]
    for rank, row in enumerate(rows):
        y = top + pitch * rank
        parts.append(_text(left - 8, y + height / 2 + 4, f"rank {rank}", size=12, anchor="end"))
        parts.append(_rect(left, y, plot, height, "#eceff2", "none"))
        for box in row:
            x, wide = left + float(box.start) * scale, float(box.end - box.start) * scale
            parts.append(_rect(x, y, wide, height, _colour(box.kind, box.chunk, chunks), "white"))
            size = min(11.0, 1.5 * wide / len(str(schedule.microbatches - 1)))
            if size >= 5:
                middle = y + height / 2 + 0.36 * size
                parts.append(_text(x + wide / 2, middle, str(box.microbatch), size=size))
    parts.append(
        f"<path d='M{left} {bottom + 6}h{_number(plot)}m-6 -3l6 3l-6 3' fill='none' stroke='#555'/>"
    )
    parts.append(
        _text(left + plot, bottom + 21, f"time {_amount(timeline.makespan)}", anchor="end")
    )
    x = float(left)
    for kind, chunk in swatches:
        name = _swatch_name(kind, chunk, chunks)
        parts.append(_rect(x, bottom + 32, 14, 14, _colour(kind, chunk, chunks), "none"))
        parts.append(_text(x + 19, bottom + 43, name, anchor="start"))
        x += 38 + 6.2 * len(name)
    parts.append(_rect(x, bottom + 32, 14, 14, "#eceff2", "none"))
    parts.append(_text(x + 19, bottom + 43, "idle", anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _boxes(timeline: Timeline, rank: int) -> Iterator[_Box]:
    schedule = timeline.schedule
    chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.placement.stages_of(rank))}
    for code, start, end in zip(
        schedule.ops[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    ):
        op = unpack(code)
        yield _Box(op.kind, op.microbatch, chunk_of[op.stage], start, end)


def _chunks(timeline: Timeline) -> int:
    placement = timeline.schedule.placement
    return max(len(placement.stages_of(rank)) for rank in range(placement.ranks))


def _usual_length(rows: list[list[_Box]]) -> float:
    """The lower median of the lengths above zero."""
    lengths = sorted(box.end - box.start for row in rows for box in row if box.end > box.start)
    return float(lengths[(len(lengths) - 1) // 2]) if lengths else 1.0


def _label(box: _Box, chunked: bool) -> str:
    letters = ascii_lowercase
    chunk = letters[box.chunk] if box.chunk < len(letters) else f".{box.chunk}"
    return f"{box.kind.name}{box.microbatch}{chunk if chunked else ''}"


def _row(row: list[_Box], window: tuple[int, int], scale: float, gap: int, chunked: bool) -> str:
    """Columns window[0] .. window[1]-1 of a row; an operation cut by the window has no label."""
    first, last = window
    cells = ["."] * (last - first)
    for box in row:
        start, end = round(box.start * scale), round(box.end * scale)
        if start >= last or end <= first:
            continue
        label = _label(box, chunked)
        if start < first or end > last:
            label = ""
        elif len(label) > end - start:
            label = box.kind.name
        drawn = label.ljust(end - start - gap, "-").ljust(end - start)
        for column in range(max(start, first), min(end, last)):
            cells[column - first] = drawn[column - start]
    return "".join(cells)


def _summary(timeline: Timeline) -> str:
    return (
        f"time {_amount(timeline.makespan)}; idle {float(timeline.bubble_makespan):.1%} of the "
        f"makespan, {float(timeline.bubble_ideal):.1%} of the ideal time, "
        f"{float(timeline.bubble_span):.1%} of the longest rank span"
    )


def _amount(time: Time) -> str:
    return f"{float(time):g}"


def _swatch_name(kind: Kind, chunk: int, chunks: int) -> str:
    return _NAMES[kind] + (f", chunk {chunk}" if chunks > 1 else "")


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of the kind, mixed with up to 60% white for the last chunk."""
    white = 0.6 * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in _COLOURS[kind])


def _rect(x: float, y: float, wide: float, high: float, fill: str, stroke: str) -> str:
    return (
        f"<rect x='{_number(x)}' y='{_number(y)}' width='{_number(wide)}' "
        f"height='{_number(high)}' fill='{fill}' stroke='{stroke}'/>"
    )


def _text(x: float, y: float, words: str, *, size: float = 11, anchor: str = "middle") -> str:
    return (
        f"<text x='{_number(x)}' y='{_number(y)}' font-size='{_number(size)}' "
        f"text-anchor='{anchor}' fill='#222'>{escape(words)}</text>"
    )


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
