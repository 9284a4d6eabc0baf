"""Generators of schedules, one file per family; importing this package registers them all."""

from megapipe.schedule.generators import gpipe, interleaved, one_f_one_b, zero_bubble
from megapipe.schedule.generators.forward import forward_only
from megapipe.schedule.generators.gpipe import gpipe_on
from megapipe.schedule.generators.registry import accepts, build, names, register

__all__ = [
    "accepts",
    "build",
    "forward_only",
    "gpipe",
    "gpipe_on",
    "interleaved",
    "names",
    "one_f_one_b",
    "register",
    "zero_bubble",
]
