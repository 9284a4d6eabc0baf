"""The picture of a search: time over memory of the planned layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from megapipe.plan.search.estimate import Estimate
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
LEFT, RIGHT, TOP, BOTTOM = 70.0, 30.0, 88.0, 52.0
DOT = 4.0
COLOURS = (
    *("#6a99d6", "#e08562", "#58ae92", "#e8be5c", "#a88ac6", "#5f7f95", "#c7739f", "#8f9a3c"),
    *("#3f63a8", "#a3512f", "#2b7a60", "#a5801f"),
)
"""Colours of schedules; those with most layouts have colours of their own."""
OTHER = "#b9bcc2"
"""Colour of all other schedules."""


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
    colours = _colours(planned)
    scene.shapes += _legend(colours)
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
        colour = colours.get(each.choice.schedule, OTHER)
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


def _colours(planned: Sequence[Estimate]) -> dict[str, str]:
    """Return the colours of the schedules with most planned layouts."""
    common = Counter(each.choice.schedule for each in planned).most_common(len(COLOURS))
    return dict(zip((name for name, _ in common), COLOURS, strict=False))


def _legend(colours: Mapping[str, str]) -> Iterator[Shape]:
    x, y = LEFT, 34.0
    for name, colour in colours.items():
        length = 34 + 6.2 * len(name)
        if x + length > WIDTH - RIGHT:
            x, y = LEFT, y + 14
        yield Rectangle(x, y, 2 * DOT, 2 * DOT, colour)
        yield Words(x + 13, y + 8, name, anchor="start")
        x += length
    text = "less memory only with more time"
    if x + 23 + 6.2 * len(text) > WIDTH - RIGHT:
        x, y = LEFT, y + 14
    yield Polygon(((x, y + 4), (x + 18, y + 4), (x + 18, y + 5), (x, y + 5)), INK)
    yield Words(x + 23, y + 8, text, anchor="start")
