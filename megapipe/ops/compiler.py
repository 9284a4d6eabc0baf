"""torch.compile as the layers use it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megapipe.ops.probe import load_module

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


def compile_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile elementwise operations on the rows of tensors [..., width]: once for each combination
    of widths, whatever number of rows they have, which differs from micro-batch to micro-batch
    where experts have rows."""
    compiled: dict[Any, Callable[..., Tensor]] = {}

    def run(*args: Tensor) -> Tensor:
        flat = [x.reshape(-1, x.shape[-1]) for x in args]
        if len(flat[0]) < FEWEST_ROWS:
            return function(*args)
        key = tuple((x.shape[1], x.stride(), x.dtype) for x in flat)
        if key not in compiled:
            compiled[key] = torch.compile(_own(function), fullgraph=True)
        for x in flat:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled[key](*flat).view(*args[0].shape[:-1], -1)

    return run


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with a code object of its own: dynamo counts and limits the graphs of a code object,
    whoever compiled it."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def needs_inductor(device: torch.device) -> None:
    """Raise :class:`Unavailable` where inductor has nothing to compile for `device` with."""
    if device.type == "cuda":
        load_module("triton", "triton")
