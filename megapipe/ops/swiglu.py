"""SwiGLU's gate: torch's kernels, or Liger's one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
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

SwigluKernel = Callable[[Tensor], Tensor]
"""gate and up, [..., 2 f] -> silu(gate) * up, [..., f]."""


_silu, _silu_grad = torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input


class _Swiglu(Function):
    """Saves gate and up alone; the backward computes silu(gate) again, in its result's memory."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        (gate, up), (grad_gate, grad_up) = (t.chunk(2, dim=-1) for t in (both, out))
        _silu(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        _silu_grad(grad_gate, gate, grad_input=grad_gate)
        return out


def torch_swiglu(both: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # a compiler sees for itself what to keep
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return _Swiglu.apply(both)


def liger_swiglu(function: Any) -> SwigluKernel:
    """Liger's autograd function. Its backward overwrites the tensors that it saved; they are copies
    where inputs are not contiguous, as the two halves of one projection are not."""

    def swiglu(both: Tensor) -> Tensor:
        return function.apply(*both.chunk(2, dim=-1))

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
        y = kernel(both)
        return [y, *torch.autograd.grad(y, [both], grad)]

    def check(kernel: SwigluKernel) -> None:
        agree(kernel, torch_swiglu, results, dtype)

    return [
        Candidate("liger", liger, check, "liger-kernel"),
        Candidate("torch", lambda: torch_swiglu),
    ]
