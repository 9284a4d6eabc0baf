"""Output of a scene as PNG, drawn with matplotlib."""

from pathlib import Path as File

from megapipe.errors import ConfigError
from megapipe.schedule.ir import Schedule
from megapipe.schedule.render.picture import picture
from megapipe.schedule.render.scene import Path, Polygon, Rectangle, Scene, Words
from megapipe.schedule.timing.simulate import Timeline

_PIXELS = 100
"""Number of a scene's pixels per inch."""
_SIDES = {"start": "left", "middle": "center", "end": "right"}
_HATCHES = ("///", "\\\\\\", "|||", "---")


def png(drawn: Schedule | Timeline, path: File, *, width: float = 1600, dpi: int = 200) -> None:
    """Write a drawing as a PNG file with dpi / 100 times the width and height of the SVG.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    to_png(picture(drawn, width=width), path, dpi=dpi)


def to_png(scene: Scene, path: File, *, dpi: int = 200) -> None:
    """Write a scene as a PNG file."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Polygon as Area
        from matplotlib.patches import Rectangle as Box
    except ImportError:
        raise ConfigError(
            f"{path}: PNG needs matplotlib; install it, or write a .svg file"
        ) from None
    figure = Figure(figsize=(scene.width / _PIXELS, scene.height / _PIXELS))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.axis("off")
    point = 72 / _PIXELS
    for order, shape in enumerate(scene.shapes):
        match shape:
            case Rectangle():
                bounds = ((shape.x, shape.y), shape.width, shape.height)
                edge = shape.edge or "none"
                line = point if shape.edge else 0
                axes.add_patch(Box(*bounds, fc=shape.fill, ec=edge, lw=line, zorder=order))
                if shape.hatch:
                    hatch = _HATCHES[(shape.hatch - 1) % len(_HATCHES)]
                    pale = (1, 1, 1, 0.6)
                    axes.add_patch(
                        Box(*bounds, fill=False, hatch=hatch, ec=pale, lw=0, zorder=order)
                    )
            case Words():
                side = _SIDES[shape.anchor]
                size = 0.92 * shape.size * point
                axes.text(
                    shape.x,
                    shape.y,
                    shape.words,
                    ha=side,
                    size=size,
                    color=shape.colour,
                    zorder=order,
                )
            case Polygon():
                axes.add_patch(Area(shape.points, fc=shape.fill, lw=0, zorder=order))
            case Path():
                xs, ys = zip(*shape.points, strict=True)
                axes.add_line(Line2D(xs, ys, color=shape.colour, lw=point, zorder=order))
    figure.savefig(path, dpi=dpi, format="png")
