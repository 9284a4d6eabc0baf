"""Output of a scene as SVG."""

from html import escape  # xml.sax's escape imports urllib

from megapipe.schedule.ir import Schedule
from megapipe.schedule.render.picture import picture
from megapipe.schedule.render.scene import Path, Polygon, Rectangle, Scene, Shape, Words
from megapipe.schedule.timing.simulate import Timeline

_FONT = "font-family='Helvetica, Arial, sans-serif'"
_TURNS = (45, -45, 0, 90)
"""Rotation of the lines in hatching patterns 1, 2, ..., in degrees."""


def svg(drawn: Schedule | Timeline, *, width: float = 1600) -> str:
    """Return a drawing as an SVG document; see :func:`megapipe.schedule.render.picture.picture`."""
    return to_svg(picture(drawn, width=width))


def to_svg(scene: Scene) -> str:
    """Return a scene as an SVG document."""
    size = f"width='{_number(scene.width)}' height='{_number(scene.height)}'"
    box = f"viewBox='0 0 {_number(scene.width)} {_number(scene.height)}'"
    hatches = {
        shape.hatch for shape in scene.shapes if isinstance(shape, Rectangle) and shape.hatch
    }
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' {size} {box} {_FONT}>",
        *(_pattern(hatch) for hatch in sorted(hatches)),
        "<rect width='100%' height='100%' fill='white'/>",
        *(_element(shape) for shape in scene.shapes),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _pattern(hatch: int) -> str:
    turn = _TURNS[(hatch - 1) % len(_TURNS)]
    return (
        f"<pattern id='hatch{hatch}' width='5' height='5' patternUnits='userSpaceOnUse' "
        f"patternTransform='rotate({turn})'><path d='M0 0v5' stroke='white' stroke-width='2.4' "
        "stroke-opacity='0.55'/></pattern>"
    )


def _element(shape: Shape) -> str:
    match shape:
        case Rectangle():
            whole = _rect(shape, shape.fill, shape.edge or "none")
            return whole + (_rect(shape, f"url(#hatch{shape.hatch})", "none") * (shape.hatch > 0))
        case Words():
            return (
                f"<text x='{_number(shape.x)}' y='{_number(shape.y)}' "
                f"font-size='{_number(shape.size)}' text-anchor='{shape.anchor}' "
                f"fill='{shape.colour}'>{escape(shape.words, quote=False)}</text>"
            )
        case Polygon():
            return f"<path d='{_line(shape.points)}z' fill='{shape.fill}'/>"
        case Path():
            return f"<path d='{_line(shape.points)}' fill='none' stroke='{shape.colour}'/>"


def _rect(shape: Rectangle, fill: str, edge: str) -> str:
    return (
        f"<rect x='{_number(shape.x)}' y='{_number(shape.y)}' width='{_number(shape.width)}' "
        f"height='{_number(shape.height)}' fill=\"{escape(fill)}\" stroke='{edge}'/>"
    )


def _line(points: tuple[tuple[float, float], ...]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
