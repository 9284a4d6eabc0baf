"""LayerNorm and RMSNorm kernels: torch's, apex's, Liger's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from megapipe.ops.probe import (
    Candidate,
    Unavailable,
    agree,
    load_module,
    needs_cuda,
    needs_fp32,
    needs_no_graph,
    small_data,
)

NormKernel = Callable[[Tensor, Tensor, "Tensor | None", float, bool, bool], Tensor]
"""Function (x [..., h], weight [h], bias [h] or None, eps, centred, offset) -> [..., h]. `centred`:
LayerNorm, else RMSNorm. `offset`: the RMSNorm weight is zero-centred, stored as a difference from
1. Autograd computes all gradients, including those of the weights."""


class _RMSNorm(Function):
    """RMSNorm for two cases: on the CPU, where torch has no kernel and saves the normalised input
    too; and with zero-centred weights (`offset`), which torch does not support in bf16 and fp16.

    The norm is computed in fp32 (fp64 for fp64), and saves the input and one factor per row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        rstd = square.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        return (wide * rstd).mul_(_full(weight, wide.dtype) if offset else weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        wide, g = (t.to(rstd.dtype) for t in (x, grad))
        w = _full(weight, rstd.dtype) if ctx.offset else weight.to(rstd.dtype)
        product = (g * wide).flatten(0, -2)  # [rows, h]
        grad_weight = None  # frozen weight
        if ctx.needs_input_grad[1]:
            grad_weight = (rstd.flatten() @ product).to(weight.dtype)
        mean = (product @ w).view_as(rstd).div_(x.shape[-1])
        grad_x = (g * w).mul_(rstd).addcmul_(wide, mean * rstd**3, value=-1)
        return grad_x.to(x.dtype), grad_weight, None, None


def _full(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 + a zero-centred `weight` in `dtype`, fp32 or fp64: in bf16 or fp16 the sum would
    lose precision."""
    return weight.to(dtype) + 1


def torch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    offset: bool = False,
) -> Tensor:
    if centred:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    if x.is_cuda and not offset:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps, offset)


def apex_norm(extension: Any) -> NormKernel:
    """Return apex's fused norms; `extension` is apex.normalization.fused_layer_norm."""

    def norm(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        offset: bool = False,
    ) -> Tensor:
        assert not offset
        if centred:
            return extension.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
        return extension.fused_rms_norm_affine(x, weight, weight.shape, eps)

    return norm


def liger_norm(layer_norm: Any, rms_norm: Any) -> NormKernel:
    """Return Liger's Triton norms, given its two autograd functions."""

    def norm(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        offset: bool = False,
    ) -> Tensor:
        if centred:
            return layer_norm.apply(x, weight, bias, eps)
        # gemma: all in fp32, like torch; not in place: the gradient may be in use elsewhere
        return rms_norm.apply(x, weight, eps, float(offset), "gemma", False)

    return norm


def candidates(
    *,
    device: torch.device,
    dtype: torch.dtype,
    hidden: int,
    eps: float,
    centred: bool,
    bias: bool,
    offset: bool = False,
    compiled: bool = False,
) -> list[Candidate[NormKernel]]:
    """Return apex's, Liger's and torch's kernels; only torch's can be part of a compiled block."""

    def usable() -> None:
        needs_cuda(device)
        needs_no_graph(compiled)
        needs_fp32(dtype)
        if centred and not bias:
            raise Unavailable("has no layernorm without bias (model.bias)")

    def apex() -> NormKernel:
        usable()
        if offset:
            raise Unavailable("has no zero-centred weights (model.zero_centered_norm)")
        load_module("fused_layer_norm_cuda", "NVIDIA apex")
        return apex_norm(load_module("apex.normalization.fused_layer_norm", "NVIDIA apex"))

    def liger() -> NormKernel:
        usable()
        layer = load_module("liger_kernel.ops.layer_norm", "liger-kernel")
        rms = load_module("liger_kernel.ops.rms_norm", "liger-kernel")
        return liger_norm(layer.LigerLayerNormFunction, rms.LigerRMSNormFunction)

    def results(kernel: NormKernel, precision: torch.dtype) -> Sequence[Tensor]:
        shapes = [(6, 2, hidden), (hidden,), (hidden,), (6, 2, hidden)]
        x, weight, shift, grad = small_data(shapes, dtype, precision, device)
        y = kernel(x, weight, shift if bias and centred else None, eps, centred, offset)
        leaves = [x, weight, shift] if bias and centred else [x, weight]
        return [y, *torch.autograd.grad(y, leaves, grad)]

    def check(kernel: NormKernel) -> None:
        agree(kernel, torch_norm, results, dtype)

    return [
        Candidate("apex", apex, check, "apex"),
        Candidate("liger", liger, check, "liger-kernel"),
        Candidate("torch", lambda: torch_norm),
    ]
