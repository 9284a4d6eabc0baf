"""SwiGLU's gate: torch's two kernels, or Liger's one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.ops.probe import (
    Candidate,
    agree,
    load_module,
    needs_cuda,
    needs_fp32,
    needs_no_graph,
    small_data,
)

SwigluKernel = Callable[[Tensor, Tensor], Tensor]
"""(gate [..., f], up [..., f]) -> silu(gate) * up."""


def torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def liger_swiglu(function: Any) -> SwigluKernel:
    """Liger's autograd function. Its backward writes over what it saved: inputs that are not
    contiguous, as the two halves of one projection are, are copied by it first."""

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return function.apply(gate, up)

    return swiglu


def candidates(
    *, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> list[Candidate[SwigluKernel]]:
    """Liger before torch, which alone can be part of a compiled block."""

    def liger() -> SwigluKernel:
        needs_cuda(device)
        needs_no_graph(compiled)
        needs_fp32(dtype)
        module = load_module("liger_kernel.ops.swiglu", "liger-kernel")
        return liger_swiglu(module.LigerSiLUMulFunction)

    def results(kernel: SwigluKernel, precision: torch.dtype) -> Sequence[Tensor]:
        both, grad = small_data([(6, 2, 256), (6, 2, 128)], dtype, precision, device)
        y = kernel(*both.chunk(2, dim=-1))
        return [y, *torch.autograd.grad(y, [both], grad)]

    def check(kernel: SwigluKernel) -> None:
        agree(kernel, torch_swiglu, results, dtype)

    return [
        Candidate("liger", liger, check, "liger-kernel"),
        Candidate("torch", lambda: torch_swiglu),
    ]
