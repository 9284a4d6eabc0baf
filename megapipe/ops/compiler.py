"""torch.compile as the layers use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to its compiled form, which compiles at its first calls."""


def torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with inductor to one graph, or raise at the first call; new shapes compile again."""
    return torch.compile(function, fullgraph=True, dynamic=False)
