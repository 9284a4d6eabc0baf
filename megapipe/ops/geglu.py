"""Gate of a GeGLU MLP: gelu(gate) * up, with the tanh approximation of GELU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

_gelu, _gelu_grad = torch.ops.aten.gelu.out, torch.ops.aten.gelu_backward.grad_input


class _Geglu(Function):
    """GeGLU that saves gate and up; the backward recomputes gelu(gate) in its result's memory."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        out = torch.empty_like(both)
        (gate, up), (grad_gate, grad_up) = (t.chunk(2, dim=-1) for t in (both, out))
        _gelu(gate, approximate="tanh", out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        _gelu_grad(grad_gate, gate, approximate="tanh", grad_input=grad_gate)
        return out


def torch_geglu(both: Tensor) -> Tensor:
    """Map gate and up, [..., 2 f], to gelu(gate) * up, [..., f]."""
    if torch.compiler.is_compiling():  # the compiler decides what to save
        gate, up = both.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up
    return _Geglu.apply(both)
