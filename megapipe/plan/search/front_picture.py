"""The picture of a search: time over memory of the planned layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from megapipe.plan.search.estimate import Estimate
from megapipe.plan.search.layouts import SCHEDULES
from megapipe.schedule.render.picture import Band, axis
from megapipe.schedule.render.scene import (
    IDLE,
    INK,
    LINE,
    REDUCE,
    Path,
    Polygon,
    Rectangle,
    Scene,
    Shape,
    Words,
)

WIDTH, HEIGHT = 900.0, 560.0
LEFT, RIGHT, TOP, BOTTOM = 70.0, 30.0, 64.0, 52.0
DOT = 4.0
_COLOURS = "#6a99d6", "#e08562", "#58ae92", "#e8be5c", "#a88ac6", "#5f7f95", "#c7739f", "#8f9a3c"
COLOURS = dict(zip(SCHEDULES, _COLOURS, strict=True))
"""Colour of each schedule."""


def front_picture(
    title: str, planned: Sequence[Estimate], front: Sequence[Estimate], room: float | None
) -> Scene:
    """Draw a dot for each planned layout, in the colour of its schedule, at its memory in GB and
    its time of a step in seconds; the `front`, the fastest first; and the bytes that a plan may
    take, if `room` is not None."""
    sizes = [each.bytes / 1e9 for each in planned]
    ends = [*sizes, *([room / 1e9] if room is not None else [])]
    margin = 0.05 * (max(ends) - min(ends)) or 1.0
    across = _band(min(ends) - margin, max(ends) + margin, LEFT, WIDTH - LEFT - RIGHT)
    times = [each.seconds for each in planned]
    margin = 0.05 * (max(times) - min(times)) or 0.05 * max(times)
    down = _band(min(times) - margin, max(times) + margin, 0.0, HEIGHT - TOP - BOTTOM)
    bottom = HEIGHT - BOTTOM

    def at(found: Estimate) -> tuple[float, float]:
        return across.x(found.bytes / 1e9), bottom - down.x(found.seconds)

    scene = Scene(WIDTH, HEIGHT, [Words(LEFT, 22, title, size=14, anchor="start")])
    scene.shapes += _legend(planned)
    scene.shapes += axis(across, bottom, "")
    named = Words(across.right, bottom + 34, "GB of the process that needs most", anchor="end")
    scene.shapes.append(named)
    scene.shapes += _upright(down, bottom)
    if room is not None:
        x = across.x(room / 1e9)
        scene.shapes += [
            Path(((x, TOP), (x, bottom)), REDUCE),
            Words(x - 4, TOP + 10, "device, less its margin", anchor="end", colour=REDUCE),
        ]
    for (x, y), (next_x, next_y) in pairwise(map(at, front)):
        corner = x, next_y  # with less memory than the first, no layout is faster than the second
        scene.shapes.append(Path(((x, y), corner, (next_x, next_y)), INK))
    on_front = {str(each.choice) for each in front}
    for each in sorted(planned, key=lambda each: str(each.choice) in on_front):
        edge = INK if str(each.choice) in on_front else None
        x, y = at(each)
        colour = COLOURS[each.choice.schedule]
        scene.shapes.append(Rectangle(x - DOT, y - DOT, 2 * DOT, 2 * DOT, colour, edge))
    return scene


def _band(start: float, end: float, left: float, length: float) -> Band:
    return Band(start, end, left, length / (end - start))


def _upright(band: Band, bottom: float) -> Iterator[Shape]:
    """Draw the axis of times: the horizontal axis of `band`, turned."""
    yield Words(LEFT - 50, TOP - 8, "seconds of a step", anchor="start")
    for shape in axis(band, 0.0, ""):
        match shape:
            case Path():
                turned = tuple((LEFT - y, bottom - x) for x, y in shape.points)
                yield Path(turned, LINE)
                if turned[0][0] != turned[1][0]:  # a tick
                    yield Path((turned[0], (WIDTH - RIGHT, turned[0][1])), IDLE)
            case Words():
                yield Words(LEFT - 7, bottom - shape.x + 4, shape.words, anchor="end", colour=LINE)


def _legend(planned: Sequence[Estimate]) -> Iterator[Shape]:
    x = LEFT
    schedules = {each.choice.schedule for each in planned}
    for name in filter(schedules.__contains__, COLOURS):
        yield Rectangle(x, 34, 2 * DOT, 2 * DOT, COLOURS[name])
        yield Words(x + 13, 42, name, anchor="start")
        x += 34 + 6.2 * len(name)
    yield Polygon(((x, 38), (x + 18, 38), (x + 18, 39), (x, 39)), INK)
    yield Words(x + 23, 42, "less memory only with more time", anchor="start")
