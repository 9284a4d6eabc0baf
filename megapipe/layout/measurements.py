"""Where a layout depends on what stages of it keep and send: who runs them tells."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.layout import Layout


class ExpertForm(NamedTuple):
    """How tokens get to their experts, as the section `experts` has it."""

    dispatch: str
    chunks: int


class Measurements(NamedTuple):
    """Functions that run stages of a layout without values."""

    freed: Callable[[Config, Layout], Fraction]
    """The share of a micro-batch's activations that an I frees at every stage."""
    experts: Callable[[Config, Layout], ExpertForm]
    """A choice for what is `auto` in the section `experts`, of a layout without it."""
