"""The time axis of a picture."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log10

from megapipe.schedule.cost import Time
from megapipe.schedule.render.boxes import amount
from megapipe.schedule.render.colours import LINE
from megapipe.schedule.render.scene import Path, Shape, Words


@dataclass(frozen=True)
class Band:
    """A part of the time, and where it is drawn."""

    start: float
    end: float
    left: float
    """Where it starts, in pixels."""
    scale: float
    """Pixels per unit of time."""

    def x(self, time: Time) -> float:
        """The place of a time, moved to the nearer end where it is outside."""
        return self.left + (min(max(float(time), self.start), self.end) - self.start) * self.scale

    @property
    def right(self) -> float:
        """Where it ends, in pixels."""
        return self.x(self.end)


def axis(band: Band, y: float, words: str) -> Iterator[Shape]:
    """A line with ticks at round times, and words at its end."""
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
    """The smallest 1, 2 or 5 times a power of ten that is not below least."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
