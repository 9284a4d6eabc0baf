"""Drawings of a schedule in time: characters for a terminal, SVG and PNG for a page.

A timeline becomes bars (:mod:`~megapipe.schedule.render.bars`). These are written in rows of
characters (:mod:`~megapipe.schedule.render.terminal`), or laid out as one scene of shapes
(:mod:`~megapipe.schedule.render.picture`) that SVG and PNG have in common.
"""

from megapipe.schedule.render.raster import png
from megapipe.schedule.render.terminal import draw_rows, text
from megapipe.schedule.render.vector import svg

__all__ = ["draw_rows", "png", "svg", "text"]
