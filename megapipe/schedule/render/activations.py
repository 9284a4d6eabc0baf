"""The activations of each rank over time, as small curves below each other."""

from collections.abc import Iterator, Sequence

from megapipe.schedule.cost import Time
from megapipe.schedule.render.axis import Band
from megapipe.schedule.render.boxes import amount
from megapipe.schedule.render.colours import LINE, MEMORY
from megapipe.schedule.render.scene import Path, Polygon, Shape, Words

HEADER = 18.0
Steps = Sequence[tuple[Time, Time]]
"""(from when, activations alive) of a rank."""


def activations(
    held: Sequence[Steps], words: str, band: Band, top: float, height: float, pitch: float
) -> Iterator[Shape]:
    """Words, and under them a curve per rank, all to one scale: `height` pixels for the largest
    peak, `pitch` pixels from rank to rank."""
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
    """The area under a step function, `unit` pixels high per micro-batch."""
    points = [(band.left, bottom)]
    for time, value in steps:
        x = band.x(time)
        points += [(x, points[-1][1]), (x, bottom - float(value) * unit)]
    return (*points, (band.right, points[-1][1]), (band.right, bottom))
