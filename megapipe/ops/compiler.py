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
            # dynamo counts and limits the graphs of a code object, whoever compiled it
            own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
            compiled[key] = torch_compile(own)
        return compiled[key](*args)

    return run


def needs_inductor(device: torch.device) -> None:
    """Raise :class:`Unavailable` where inductor has nothing to compile for `device` with."""
    if device.type == "cuda":
        load_module("triton", "triton")
