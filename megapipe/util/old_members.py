"""Deprecated class names of version 0.1. Each one resolves to the renamed class, with a warning."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def renamed(module: str, name: str, names: dict[str, str]) -> Any:
    """Return the member of `module` whose deprecated name is `name`, for the ``__getattr__`` of
    that module. `names` maps each deprecated name to the present one. Raises AttributeError if
    `name` is not among them."""
    if name not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(
        f"{module}.{name} is called {names[name]}; the old name works for one more release",
        FutureWarning,
        stacklevel=3,
    )
    return getattr(sys.modules[module], names[name])
