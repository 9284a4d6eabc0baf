"""Interface of the functions that measure stages. The caller passes them to
:func:`~megapipe.layout.resolve.resolve`, so the layout needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.layout import Layout


class ExpertForm(NamedTuple):
    """Resolved `dispatch` and `overlap_chunks` of the section `experts`."""

    dispatch: str
    overlap_chunks: int


class Measurements(NamedTuple):
    """Functions that measure a layout by running its stages on meta tensors."""

    freed: Callable[[Config, Layout], Fraction]
    """Function that measures the smallest fraction of activations that an I frees."""
    experts: Callable[[Config, Layout], ExpertForm]
    """Function that chooses values for `experts.dispatch` and `overlap_chunks` if auto."""
