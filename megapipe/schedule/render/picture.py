"""The picture of a schedule for a page: time lines, activations, legend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor, log10

from megapipe.schedule.cost import Time
from megapipe.schedule.ir import Schedule
from megapipe.schedule.memory import curve
from megapipe.schedule.render.bars import NAMES, Bar, OpBar, amount, bars, most_chunks, usual_length
from megapipe.schedule.render.scene import (
    GATHER,
    IDLE,
    LINE,
    MEMORY,
    REDUCE,
    Path,
    Polygon,
    Rectangle,
    Scene,
    Shape,
    Words,
    shade,
)
from megapipe.schedule.timing.simulate import Timeline, simulate

LEFT, TOP, RIGHT = 64.0, 40.0, 62.0


@dataclass(frozen=True)
class Band:
    """A range of time, and where it is drawn."""

    start: float
    end: float
    left: float
    """Left end of the band, in pixels."""
    scale: float
    """Width of a unit of time, in pixels."""

    def x(self, time: Time) -> float:
        """Return the position of a time in pixels; a time outside the band is moved to the nearer
        end."""
        return self.left + (min(max(float(time), self.start), self.end) - self.start) * self.scale

    @property
    def right(self) -> float:
        """Right end of the band, in pixels."""
        return self.x(self.end)


def axis(band: Band, y: float, words: str) -> Iterator[Shape]:
    """Draw a line with ticks at round times, and words at its end."""
    yield Path(((band.left, y), (band.right, y)), LINE)
    if words:
        yield Words(band.right, y + 14, words, anchor="end")
    step = _round_step(90 / band.scale)
    for number in range(ceil(band.start / step), floor(band.end / step) + 1):
        x = band.x(number * step)
        yield Path(((x, y), (x, y + 3)), LINE)
        label = amount(number * step)
        if x + 4 * len(label) < band.right - 7 * len(words):
            yield Words(x, y + 14, label, colour=LINE)


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


SWATCH = 14.0


def legend(
    rows: list[list[Bar]], timeline: Timeline, chunks: int, x: float, y: float
) -> tuple[list[Shape], float]:
    """Draw the legend with its upper left corner at (x, y); return its shapes and its right end."""
    kinds = sorted({part.op.kind for row in rows for bar in row for part in bar.parts})
    entries = [
        (NAMES[kind], [(shade(kind, chunk, chunks), 0) for chunk in range(chunks)])
        for kind in kinds
    ]
    entries.append(("idle", [(IDLE, 0)]))
    entries += [("parameters gathered", [(GATHER, 0)])] if timeline.gathers else []
    entries += [("gradients reduced", [(REDUCE, 0)])] if timeline.reductions else []
    directions = len(timeline.schedule.placement.table)
    if directions > 1:
        entries += [
            (f"direction {direction}", [(LINE, direction)]) for direction in range(directions)
        ]
    if chunks > 1:
        entries.append((f"dark to pale: chunks 0 to {chunks - 1}", []))
    shapes: list[Shape] = []
    for name, fills in entries:
        for fill, hatch in fills:
            shapes.append(Rectangle(x, y, SWATCH, SWATCH, fill, hatch=hatch))
            x += SWATCH
        shapes.append(Words(x + 5, y + 11, name, anchor="start"))
        x += 24 + 6.2 * len(name)
    return shapes, x


HEADER = 18.0
Steps = Sequence[tuple[Time, Time]]
"""Curve of a rank's activations: (time, number alive from then on)."""


def activations(
    held: Sequence[Steps], words: str, band: Band, top: float, height: float, pitch: float
) -> Iterator[Shape]:
    """Draw a caption, and under it a curve of activations per rank, all to one scale: `height`
    pixels for the largest peak, `pitch` pixels from rank to rank."""
    yield Words(band.left, top + 10, words, anchor="start", colour=LINE)
    most = float(max(value for steps in held for _, value in steps)) or 1.0
    size = min(11.0, height)
    for rank, steps in enumerate(held):
        bottom = top + HEADER + rank * pitch + height
        peak = amount(max(value for _, value in steps))
        yield Words(band.left - 8, bottom - 1, f"rank {rank}", size=size, anchor="end")
        yield Polygon(_outline(steps, band, bottom, height / most), MEMORY)
        yield Path(((band.left, bottom), (band.right, bottom)), LINE)
        yield Words(band.right + 5, bottom - 1, f"max {peak}", size=size, anchor="start")


def _outline(
    steps: Steps, band: Band, bottom: float, unit: float
) -> tuple[tuple[float, float], ...]:
    """Return the area under a step function, `unit` pixels high per micro-batch of activations."""
    points = [(band.left, bottom)]
    for time, value in steps:
        x = band.x(time)
        points += [(x, points[-1][1]), (x, bottom - float(value) * unit)]
    return (*points, (band.right, points[-1][1]), (band.right, bottom))


USUAL = 26.0
"""Width in pixels of an operation of usual (median) length, if there is room."""
STRIP = 6.0
"""Height in pixels of the strip below a time line that shows gathers and reductions."""
MOST_LINES = 128
"""Maximum number of time lines in all bands; above it, a picture has one band without numbers."""


@dataclass(frozen=True)
class _Lanes:
    """Heights of a rank's time line and activations in pixels, without and with the gap below."""

    line: float
    line_pitch: float
    held: float
    held_pitch: float


ROOMY = _Lanes(26, 30, 17, 21)
DENSE = _Lanes(19, 21, 11, 13)


def picture(
    drawn: Schedule | Timeline, *, width: float = 1600, span: tuple[Time, Time] | None = None
) -> Scene:
    """Draw one row per rank, its gathers and reductions in a strip below, then the activations of
    each rank. A schedule is simulated at unit costs first. `span`: begin and end of the drawn time.

    If operations would be too narrow for their numbers, the time is cut into bands below each
    other, of about `width` pixels each; if that takes too many bands, there is one, without
    numbers.
    """
    timeline = drawn if isinstance(drawn, Timeline) else simulate(drawn)
    schedule, chunks = timeline.schedule, most_chunks(timeline.schedule.placement)
    rows = [list(bars(timeline, rank)) for rank in range(len(timeline.starts))]
    lanes = ROOMY if len(rows) <= 8 else DENSE
    if timeline.gathers or timeline.reductions:
        lanes = replace(lanes, line_pitch=lanes.line_pitch + STRIP)
    digits = max(len(part.number) for row in rows for bar in row for part in bar.parts)
    begin, end = span or (timeline.begin, timeline.begin + timeline.makespan)
    bands = _bands(float(begin), float(end - begin) or 1.0, rows, digits, width)
    title = _title(timeline, chunks, span)
    scene = Scene(max(bands[0].right + RIGHT, 7.5 * len(title) + LEFT), TOP)
    scene.shapes.append(Words(LEFT, 22, title, size=14, anchor="start"))
    for band in bands:
        scene.shapes += _time_lines(rows, band, lanes, scene.height, digits, chunks)
        scene.shapes += _strips(timeline, band, lanes, scene.height)
        scene.height += len(rows) * lanes.line_pitch
        words = f"time {amount(end - begin)}" if band is bands[-1] else ""
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


def _bands(
    start: float, makespan: float, rows: list[list[Bar]], digits: int, width: float
) -> list[Band]:
    """Split the time into as few bands as leave room for `digits` digits per operation. The length
    of a band is a multiple of the usual length of an operation."""
    usual = float(usual_length(rows))
    least = 6.5 * digits / usual * makespan
    count = ceil(least / width) if makespan / usual * USUAL > width else 1
    count = count if count * len(rows) <= MOST_LINES else 1
    each = ceil(makespan / usual / count) * usual if count > 1 else makespan
    scale = min(USUAL / usual, width / each)
    cuts = [start + number * each for number in range(count)]
    return [Band(cut, min(cut + each, start + makespan), LEFT, scale) for cut in cuts]


def _title(timeline: Timeline, chunks: int, span: tuple[Time, Time] | None) -> str:
    schedule, updates = timeline.schedule, timeline.schedule.updates
    whole = amount(schedule.whole_microbatches)
    if span is not None and updates is not None:
        whole = f"windows of {updates.window}"
    words = [f"{schedule.name}: {schedule.placement.ranks} ranks", f"{whole} micro-batches"]
    words += [f"{chunks} chunks"] if chunks > 1 else []
    words += [f"{schedule.slices} slices"] if schedule.slices > 1 else []
    if span is None:
        idle = f"idle {float(timeline.bubble_makespan):.1%} of the makespan"
    else:
        idle = f"idle {timeline.idle_between(*span):.1%}"
    return f"{', '.join(words)}; {idle}"


def _time_lines(
    rows: list[list[Bar]], band: Band, lanes: _Lanes, top: float, digits: int, chunks: int
) -> Iterator[Shape]:
    for rank, row in enumerate(rows):
        y = top + rank * lanes.line_pitch
        middle = y + lanes.line / 2 + 4
        yield Words(band.left - 8, middle, f"rank {rank}", size=12, anchor="end")
        yield Rectangle(band.left, y, band.right - band.left, lanes.line, IDLE)
        for bar in row:
            if bar.end <= band.start or bar.start >= band.end:
                continue
            height = lanes.line / len(bar.parts)
            numbered = band.start <= float(bar.start + bar.end) / 2 < band.end
            for index, part in enumerate(bar.parts):
                x, wide = band.x(bar.start), band.x(bar.end) - band.x(bar.start)
                above = y + index * height
                yield _rectangle(part, chunks, x, above, wide, height)
                size = min(11.0, 0.8 * height, 1.35 * wide / digits)
                if numbered and size >= 5:
                    baseline = above + height / 2 + 0.36 * size
                    yield Words(x + wide / 2, baseline, part.number, size)


def _strips(timeline: Timeline, band: Band, lanes: _Lanes, top: float) -> Iterator[Shape]:
    """Draw gathers and reductions as thin bars below the time lines."""
    for fill, intervals in ((GATHER, timeline.gathers), (REDUCE, timeline.reductions)):
        for each in intervals:
            if each.end > band.start and each.start < band.end:
                x, y = band.x(each.start), top + each.rank * lanes.line_pitch + lanes.line + 1
                yield Rectangle(x, y, band.x(each.end) - x, STRIP, fill, edge="white")


def _rectangle(
    part: OpBar, chunks: int, x: float, y: float, width: float, height: float
) -> Rectangle:
    fill = shade(part.op.kind, part.chunk, chunks)
    edge = "white" if width >= 4 else None
    return Rectangle(x, y, width, height, fill, edge=edge, hatch=part.direction)
