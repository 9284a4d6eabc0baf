"""The picture of a schedule for a page: time lines, activations, legend."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from megapipe.schedule.ir import Schedule
from megapipe.schedule.ledger import curve
from megapipe.schedule.render.activations import HEADER, activations
from megapipe.schedule.render.axis import Band, axis
from megapipe.schedule.render.boxes import Box, Part, amount, boxes, most_chunks, usual_length
from megapipe.schedule.render.colours import GATHER, IDLE, REDUCE, shade
from megapipe.schedule.render.legend import legend
from megapipe.schedule.render.scene import Rectangle, Scene, Shape, Words
from megapipe.schedule.simulate import Timeline, simulate

LEFT, TOP, RIGHT = 64.0, 40.0, 62.0
USUAL = 26.0
"""Width of an operation of usual length where there is room."""
STRIP = 6.0
"""Height of what is below a time line for gathers and reductions."""
MOST_LINES = 128
"""Time lines of all bands together; a picture that needs more has no numbers."""


@dataclass(frozen=True)
class _Lanes:
    """Heights of a rank's time line and of its activations, without and with the gap below."""

    line: float
    line_pitch: float
    held: float
    held_pitch: float


ROOMY = _Lanes(26, 30, 17, 21)
DENSE = _Lanes(19, 21, 11, 13)


def picture(drawn: Schedule | Timeline, *, width: float = 1600) -> Scene:
    """One row per rank, with what it gathers and reduces in a strip below, then what each rank
    holds; a schedule is timed at unit costs first.

    Where operations would be too narrow for their numbers, the time is cut into bands below each
    other, of about `width` pixels each. If even that is not enough, it is one band without them.
    """
    timeline = drawn if isinstance(drawn, Timeline) else simulate(drawn)
    schedule, chunks = timeline.schedule, most_chunks(timeline.schedule.placement)
    rows = [list(boxes(timeline, rank)) for rank in range(len(timeline.starts))]
    lanes = ROOMY if len(rows) <= 8 else DENSE
    if timeline.gathers or timeline.reductions:
        lanes = replace(lanes, line_pitch=lanes.line_pitch + STRIP)
    digits = max(len(part.number) for row in rows for box in row for part in box.parts)
    bands = _bands(timeline, rows, digits, width)
    title = _title(timeline, chunks)
    scene = Scene(max(bands[0].right + RIGHT, 7.5 * len(title) + LEFT), TOP)
    scene.shapes.append(Words(LEFT, 22, title, size=14, anchor="start"))
    for band in bands:
        scene.shapes += _time_lines(rows, band, lanes, scene.height, digits, chunks)
        scene.shapes += _strips(timeline, band, lanes, scene.height)
        scene.height += len(rows) * lanes.line_pitch
        words = f"time {amount(timeline.makespan)}" if band is bands[-1] else ""
        scene.shapes += axis(band, scene.height, words)
        scene.height += 30
    if not schedule.forward_only:
        start, end = bands[0].start, bands[-1].end
        whole = Band(start, end, LEFT, (bands[0].right - LEFT) / (end - start))
        held = [curve(timeline, rank) for rank in range(len(rows))]
        words = "activations held, in micro-batches of a full rank"
        words += ", over the whole time" * (len(bands) > 1)
        scene.shapes += activations(held, words, whole, scene.height, lanes.held, lanes.held_pitch)
        scene.height += HEADER + len(rows) * lanes.held_pitch + 8
    entries, wide = legend(rows, timeline, chunks, LEFT, scene.height)
    scene.shapes += entries
    scene.width = max(scene.width, wide + 8)
    scene.height += 24
    return scene


def _bands(timeline: Timeline, rows: list[list[Box]], digits: int, width: float) -> list[Band]:
    """Parts of the time, as few as leave room for the numbers, each of whole usual operations."""
    start = float(timeline.begin)
    makespan = float(timeline.makespan) or 1.0
    usual = float(usual_length(rows))
    least = 6.5 * digits / usual * makespan
    count = ceil(least / width) if makespan / usual * USUAL > width else 1
    count = count if count * len(rows) <= MOST_LINES else 1
    each = ceil(makespan / usual / count) * usual if count > 1 else makespan
    scale = min(USUAL / usual, width / each)
    cuts = [start + number * each for number in range(count)]
    return [Band(cut, min(cut + each, start + makespan), LEFT, scale) for cut in cuts]


def _title(timeline: Timeline, chunks: int) -> str:
    schedule = timeline.schedule
    whole = amount(schedule.whole_microbatches)
    words = [f"{schedule.name}: {schedule.placement.ranks} ranks", f"{whole} micro-batches"]
    words += [f"{chunks} chunks"] if chunks > 1 else []
    words += [f"{schedule.slices} slices"] if schedule.slices > 1 else []
    idle = f"idle {float(timeline.bubble_makespan):.1%} of the makespan"
    return f"{', '.join(words)}; {idle}"


def _time_lines(
    rows: list[list[Box]], band: Band, lanes: _Lanes, top: float, digits: int, chunks: int
) -> Iterator[Shape]:
    for rank, row in enumerate(rows):
        y = top + rank * lanes.line_pitch
        middle = y + lanes.line / 2 + 4
        yield Words(band.left - 8, middle, f"rank {rank}", size=12, anchor="end")
        yield Rectangle(band.left, y, band.right - band.left, lanes.line, IDLE)
        for box in row:
            if box.end <= band.start or box.start >= band.end:
                continue
            height = lanes.line / len(box.parts)
            numbered = band.start <= float(box.start + box.end) / 2 < band.end
            for place, part in enumerate(box.parts):
                x, wide = band.x(box.start), band.x(box.end) - band.x(box.start)
                above = y + place * height
                yield _rectangle(part, chunks, x, above, wide, height)
                size = min(11.0, 0.8 * height, 1.35 * wide / digits)
                if numbered and size >= 5:
                    baseline = above + height / 2 + 0.36 * size
                    yield Words(x + wide / 2, baseline, part.number, size)


def _strips(timeline: Timeline, band: Band, lanes: _Lanes, top: float) -> Iterator[Shape]:
    """Thin boxes below the time lines: gathers and reductions."""
    for fill, intervals in ((GATHER, timeline.gathers), (REDUCE, timeline.reductions)):
        for each in intervals:
            if each.end > band.start and each.start < band.end:
                x, y = band.x(each.start), top + each.rank * lanes.line_pitch + lanes.line + 1
                yield Rectangle(x, y, band.x(each.end) - x, STRIP, fill, edge="white")


def _rectangle(
    part: Part, chunks: int, x: float, y: float, width: float, height: float
) -> Rectangle:
    fill = shade(part.op.kind, part.chunk, chunks)
    edge = "white" if width >= 4 else None
    return Rectangle(x, y, width, height, fill, edge=edge, hatch=part.replica)
