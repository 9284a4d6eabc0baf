"""Gate of SwiGLU: torch's kernels, Liger's, or inductor's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megapipe.ops.compiler import FEWEST_ROWS, compile_rows, needs_inductor
from megapipe.ops.probe import (
    Candidate,
    agree,
    in_preference,
    load_module,
    needs_cuda,
    needs_fp32,
    needs_no_graph,
    small_data,
)

SwigluKernel = Callable[[Tensor], Tensor]
"""Function that maps gate and up, [..., 2 f], to silu(gate) * up, [..., f]."""


_silu, _silu_grad = torch.ops.aten.silu.out, torch.ops.aten.silu_backward.grad_input


class _Swiglu(Function):
    """SwiGLU that saves gate and up; the backward recomputes silu(gate) in its result's memory."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        return _input_grad(both, grad)


def _input_grad(both: Tensor, grad: Tensor, active: Tensor | None = None) -> Tensor:
    """Return the gradient of gate and up; `active` is silu(gate), if known."""
    out = torch.empty_like(both)
    (gate, up), (grad_gate, grad_up) = (t.chunk(2, dim=-1) for t in (both, out))
    torch.mul(_silu(gate, out=grad_up) if active is None else active, grad, out=grad_up)
    torch.mul(grad, up, out=grad_gate)
    _silu_grad(grad_gate, gate, grad_input=grad_gate)
    return out


def torch_swiglu(both: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # the compiler decides what to save
        return _gate(both)
    return _Swiglu.apply(both)


def torch_swiglu_and_back(both: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return SwiGLU, and a function from its gradient to the gradient of gate and up. The function
    holds silu(gate); no graph is built."""
    gate, up = both.chunk(2, dim=-1)
    active = functional.silu(gate)
    return active * up, partial(_input_grad, both, active=active)


def _gate(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gate_grad(both: Tensor, grad: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    share = gate.sigmoid()
    of_gate = grad * up * share * (1 + gate * (1 - share))
    return torch.cat((of_gate, grad * gate * share), dim=-1)


def inductor_swiglu() -> SwigluKernel:
    """Return SwiGLU with a compiled forward and backward, one kernel each; saves gate and up."""
    forward, backward = _of_rows(_gate), _of_rows(_gate_grad)

    class Swiglu(Function):
        @staticmethod
        def forward(ctx: Any, both: Tensor) -> Tensor:
            ctx.save_for_backward(both)
            return forward(both)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return backward(*ctx.saved_tensors, grad)

    return Swiglu.apply


def _of_rows(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compile `function` for tensors [..., width], with any number of rows."""
    compiled = compile_rows(function)

    def run(*args: Tensor) -> Tensor:
        flat = [x.reshape(-1, x.shape[-1]) for x in args]
        if len(flat[0]) < FEWEST_ROWS:
            return function(*args)
        return compiled(*flat).view(*args[0].shape[:-1], -1)

    return run


def liger_swiglu(function: Any) -> SwigluKernel:
    """Wrap Liger's autograd function. Its backward overwrites the saved tensors. They are copies,
    since the two halves of a projection are not contiguous."""

    def swiglu(both: Tensor) -> Tensor:
        return function.apply(*both.chunk(2, dim=-1))

    return swiglu


def candidates(
    *, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> list[Candidate[SwigluKernel]]:
    """Return the kernels in order of preference: Liger's, inductor's, torch's; on a CPU inductor's
    last. Compiled blocks use torch's."""

    def liger() -> SwigluKernel:
        needs_cuda(device)
        needs_no_graph(compiled)
        needs_fp32(dtype)
        module = load_module("liger_kernel.ops.swiglu", "liger-kernel")
        return liger_swiglu(module.LigerSiLUMulFunction)

    def inductor() -> SwigluKernel:
        needs_inductor(device)
        needs_no_graph(compiled)
        return inductor_swiglu()

    def results(kernel: SwigluKernel, precision: torch.dtype) -> Sequence[Tensor]:
        both, grad = small_data([(6, 2, 256), (6, 2, 128)], dtype, precision, device)
        y = kernel(both)
        return [y, *torch.autograd.grad(y, [both], grad)]

    def check(kernel: SwigluKernel) -> None:
        agree(kernel, torch_swiglu, results, dtype)

    found = [
        Candidate[SwigluKernel]("liger", liger, check, "liger-kernel"),
        Candidate[SwigluKernel]("inductor", inductor, check),
        Candidate[SwigluKernel]("torch", lambda: torch_swiglu),
    ]
    return in_preference(found, device)
