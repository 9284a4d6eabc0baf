"""Several pictures below each other."""

from collections.abc import Sequence
from dataclasses import replace

from megapipe.schedule.render.scene import Rectangle, Scene, Shape, Words


def stack(scenes: Sequence[Scene]) -> Scene:
    """One scene of all, the first on top."""
    whole = Scene(max(scene.width for scene in scenes), 0)
    for scene in scenes:
        whole.shapes += [_lowered(shape, whole.height) for shape in scene.shapes]
        whole.height += scene.height
    return whole


def _lowered(shape: Shape, by: float) -> Shape:
    if isinstance(shape, Rectangle | Words):
        return replace(shape, y=shape.y + by)
    return replace(shape, points=tuple((x, y + by) for x, y in shape.points))
