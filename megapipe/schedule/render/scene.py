"""A picture as shapes, in pixels from the upper left corner: what SVG and PNG are written from."""

from dataclasses import dataclass, field
from typing import Literal

from megapipe.schedule.render.colours import INK


@dataclass(frozen=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str | None = None
    hatch: int = 0
    """0: none; others are directions of lines over the fill."""


@dataclass(frozen=True)
class Words:
    x: float
    y: float
    """Of the baseline."""
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
