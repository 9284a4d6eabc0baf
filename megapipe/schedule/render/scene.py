"""A picture as shapes, in pixels from the upper left corner; SVG and PNG are written from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from megapipe.schedule.ir import Kind

OF_KIND = {  # of the first chunk; later chunks are paler
    Kind.F: (106, 153, 214),
    Kind.B: (224, 133, 98),
    Kind.I: (88, 174, 146),
    Kind.W: (232, 190, 92),
    Kind.R: (168, 138, 198),
    Kind.U: (122, 130, 138),
}
IDLE = "#eceff2"
INK = "#222222"
LINE = "#7a828a"
MEMORY = "#b9c4d0"
PALE, DARK = (236, 243, 251), (74, 127, 196)
GATHER = "#5f7f95"
REDUCE = "#a0485a"


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """Return the colour of a kind; later chunks are paler, the last has 60% white."""
    white = 0.6 * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in OF_KIND[kind])


def mixed(part: float) -> str:
    """Return a colour between pale (`part` 0) and dark (1 and above)."""
    channels = (round(a + (b - a) * min(1.0, part)) for a, b in zip(PALE, DARK, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


@dataclass(frozen=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str | None = None
    hatch: int = 0
    """Hatching pattern over the fill, numbered from 1; 0: none."""


@dataclass(frozen=True)
class Words:
    x: float
    y: float
    """Vertical position of the baseline."""
    words: str
    size: float = 11
    anchor: Literal["start", "middle", "end"] = "middle"
    colour: str = INK


@dataclass(frozen=True)
class Polygon:
    points: tuple[tuple[float, float], ...]
    fill: str


@dataclass(frozen=True)
class Path:
    points: tuple[tuple[float, float], ...]
    colour: str


Shape = Rectangle | Words | Polygon | Path


@dataclass
class Scene:
    """Shapes in the order in which they are drawn, over white."""

    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)


def stack(scenes: Sequence[Scene]) -> Scene:
    """Return one scene with all `scenes` below each other, the first on top."""
    whole = Scene(max(scene.width for scene in scenes), 0)
    for scene in scenes:
        whole.shapes += [_lowered(shape, whole.height) for shape in scene.shapes]
        whole.height += scene.height
    return whole


def _lowered(shape: Shape, by: float) -> Shape:
    if isinstance(shape, Rectangle | Words):
        return replace(shape, y=shape.y + by)
    return replace(shape, points=tuple((x, y + by) for x, y in shape.points))
