"""torch.compile as the layers use it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megapipe.ops.probe import is_planned, load_module

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function that returns a function's compiled form, which compiles when it is first called."""
FEWEST_ROWS = 2
"""Minimum number of rows in a dynamic dimension: torch.compile makes other graphs for 0 and 1."""


def torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` with inductor to one graph for each shape, or raise at the first call."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def compile_elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a few elementwise operations, and sums over the last dimension, to one or two
    kernels, separately for each combination of shapes."""
    compiled: dict[Any, Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args)
        if key not in compiled:
            compiled[key] = torch_compile(_own(function))
        return compiled[key](*args)

    return run


def compile_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile elementwise operations on tensors [rows, ...], and sums over their last dimension.
    One compilation serves all numbers of rows from :data:`FEWEST_ROWS` on, since they differ
    between micro-batches. Arguments that are not tensors must be hashable."""
    compiled: dict[Any, Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        key = tuple(
            (x.shape[1:], x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args
        )
        if key not in compiled:
            compiled[key] = torch.compile(_own(function), fullgraph=True)
        for x in tensors:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled[key](*args)

    return run


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function with a new code object: dynamo counts and limits the graphs of a code object,
    summed over all functions that are compiled from it."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def needs_inductor(device: torch.device) -> None:
    """Raise :class:`Unavailable` if inductor cannot compile for `device`."""
    if device.type == "cuda" and not is_planned():
        load_module("triton", "triton")
