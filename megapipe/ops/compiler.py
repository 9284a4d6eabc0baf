"""torch.compile as the layers use it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megapipe.ops.probe import is_planned, load_module

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""From a function to its compiled form, which compiles at its first calls."""
FEWEST_ROWS = 2
"""A compiler makes graphs of their own for sizes of 0 and 1."""


def torch_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with inductor to one graph, or raise at the first call; new shapes compile again."""
    return torch.compile(function, fullgraph=True, dynamic=False)


def compile_elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a few elementwise operations, and sums over the last dimension, to one or two
    kernels, anew for each combination of shapes."""
    compiled: dict[Any, Callable[..., Any]] = {}

    def run(*args: Any) -> Any:
        key = tuple((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args)
        if key not in compiled:
            compiled[key] = torch_compile(_own(function))
        return compiled[key](*args)

    return run


def compile_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile elementwise operations on tensors [rows, ...], and sums over their last dimension:
    once for whatever number of rows from :data:`FEWEST_ROWS` on, which differs from micro-batch to
    micro-batch. What is no tensor can be a key of a dictionary."""
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
    """A copy with a code object of its own: dynamo counts and limits the graphs of a code object,
    whoever compiled it."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def needs_inductor(device: torch.device) -> None:
    """Raise :class:`Unavailable` where inductor has nothing to compile for `device` with."""
    if device.type == "cuda" and not is_planned():
        load_module("triton", "triton")
