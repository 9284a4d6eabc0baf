"""Layers that split their own backward, cut over tensor-parallel ranks (Shoeybi, 1909.08053).

:class:`Linear`, :class:`ColumnLinear` and :class:`RowLinear` are for the modules of a user's own
model; torch is loaded when one of them is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megapipe.layers.own import ColumnLinear, Linear, RowLinear

__all__ = ["ColumnLinear", "Linear", "RowLinear"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megapipe.layers import own

    return getattr(own, name)
