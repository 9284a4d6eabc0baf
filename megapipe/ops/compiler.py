"""torch.compile as the layers use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to its compiled form; the first calls of that compile."""


def torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph or an error, by inductor, for the shapes that come; others compile again."""
    return torch.compile(function, fullgraph=True, dynamic=False)
