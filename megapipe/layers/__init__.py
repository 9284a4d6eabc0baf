"""Layers with separate input and weight gradients, sharded over tp ranks (Shoeybi, 1909.08053).

:class:`Linear`, :class:`ColumnLinear` and :class:`RowLinear` are for user-defined models; torch is
imported when one of these classes is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megapipe.layers.user_linear import ColumnLinear, Linear, RowLinear

__all__ = ["ColumnLinear", "Linear", "RowLinear"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megapipe.layers import user_linear

    return getattr(user_linear, name)
