"""Imitations of a GPU's kernels that run on torch's meta device.

The run's own code chooses the kernels (:mod:`megapipe.assembly.kernels`). torch's GPU
kernels are called by their names, with meta tensors, and allocate as on a GPU. For a function that
Triton or inductor compiles, a stand-in allocates and saves the same tensors, with one torch
operation for each kernel. :data:`WORKSPACES` has the bytes that kernels allocate internally.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from megapipe.assembly.kernels import select_kernels
from megapipe.config.config import Config
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layout.layout import Layout
from megapipe.ops.activation import Activate
from megapipe.ops.attention import AttentionKernel, Flex, Sdpa, Varlen
from megapipe.ops.attention_choice import planned_backend
from megapipe.ops.documents import Documents
from megapipe.ops.kernels import Kernels
from megapipe.ops.loss import InductorLoss, Labels, loss_dtype
from megapipe.ops.moe.elementwise import InductorRows
from megapipe.ops.norm import torch_norm
from megapipe.ops.probe import planning
from megapipe.ops.scores import PLAIN, ScoreModifiers
from megapipe.ops.swiglu import torch_swiglu
from megapipe.ops.weight_grad import torch_accumulate, wide_accumulate

_aten: Any = torch.ops.aten


def cuda_kernels(config: Config, layout: Layout) -> Kernels:
    """Choose the kernels of a run on a GPU, except those of :class:`ContextAttention`.

    Blocks that the run would compile are planned uncompiled, so the planned memory is higher.
    """
    dtype = TORCH_DTYPES[config.model.dtype]
    with planning():
        chosen = select_kernels(
            config,
            layout.model.kernel_needs,
            torch.device("cuda"),
            dtype,
            cut=layout.schedule.slices > 1,
            split=layout.split if layout.uses_attention_tiles else None,
        )
    names = {choice.purpose: choice.name for choice in chosen.choices}
    accumulate = chosen.accumulate
    if accumulate is torch_accumulate and dtype.itemsize < torch.float32.itemsize:
        accumulate = wide_accumulate
    attention = _attention(chosen.attention, names.get("attention", ""))
    if config.plan.system == "megatron-2021":
        attention = _stored_scores
    return replace(
        chosen,
        attention=attention,
        norm=_norm,
        head_norm=_norm,
        rotary=_rotate if names.get("rotary") == "inductor" else chosen.rotary,
        swiglu=torch_swiglu if chosen.swiglu is torch_swiglu else _Swiglu.apply,
        loss=_Loss() if isinstance(chosen.loss, InductorLoss) else chosen.loss,
        moe_elementwise=_Rows()
        if isinstance(chosen.moe_elementwise, InductorRows)
        else chosen.moe_elementwise,
        accumulate=accumulate,
        dropout=_dropout,
        compiler=None,
    )


def _attention(kernel: AttentionKernel, name: str) -> AttentionKernel:
    if isinstance(kernel, Flex):
        return _flex
    if isinstance(kernel, Varlen):
        found = Varlen(_varlen)
        found.whole = _sdpa(_AUTO)
        return found
    assert isinstance(kernel, Sdpa)
    return _sdpa(_AUTO) if kernel.pinned is None else _sdpa([name], nullcontext)


_AUTO = ("flash", "efficient", "math")


def _sdpa(allowed: Collection[str], pinned: Any = None) -> Sdpa:
    return Sdpa(pinned, partial(_attend, allowed), on_gpu=True)


def _attend(
    allowed: Collection[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Attend like SDPA on a GPU, with the backend that SDPA would choose there."""
    head_dim, masked = q.shape[-1], attn_mask is not None
    name = planned_backend(q.dtype, head_dim, allowed, masked=masked, grouped=enable_gqa)
    options: dict[str, Any] = {"scale": scale}
    if name == "flash":
        padded = [pad(x, (0, -head_dim % 8)) for x in (q, k, v)] if head_dim % 8 else [q, k, v]
        scale = scale or head_dim**-0.5
        whole = _aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale
        )[0]
        return whole[..., :head_dim]
    if name == "cudnn":
        of = _aten._scaled_dot_product_cudnn_attention
        return of(q, k, v, attn_mask, True, dropout_p, is_causal, **options)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype)
    if name == "efficient":
        of = _aten._scaled_dot_product_efficient_attention
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*q.shape[:2], *attn_mask.shape[-2:])
        return of(q, k, v, attn_mask, True, dropout_p, is_causal, **options)[0]
    of = _aten._scaled_dot_product_attention_math
    return of(q, k, v, attn_mask, dropout_p, is_causal, **options, enable_gqa=enable_gqa)[0]


def _stored_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    documents: Documents | None,
    scores: ScoreModifiers = PLAIN,
) -> Tensor:
    """Attend like Megatron-LM before flash attention: two products, and between them one kernel for
    scale, mask and softmax, and one for dropout. q and the output are [b, heads, s, d]."""
    b, heads, s, d = q.shape
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    q, k, v = (x.reshape(b * heads, -1, d) for x in (q, k, v))
    weights = _aten._softmax(torch.bmm(q, k.transpose(1, 2)), -1, False)
    if dropout:
        weights = torch.native_dropout(weights, dropout, True)[0]
    return torch.bmm(weights, v).view(b, heads, s, d)


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, *runs: Any, scale: float | None = None, **_: Any
) -> Tensor:
    """Call the kernel that torch's varlen_attn calls, and save the same tensors."""
    out: Tensor = _aten._flash_attention_forward(q, k, v, *runs, 0.0, True, False, scale=scale)[0]
    return out


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float,
    documents: Documents | None,
    scores: ScoreModifiers = PLAIN,
) -> Tensor:
    """Stand in for FlexAttention, which saves its inputs, the output and an LSE, and does not
    repeat KV heads. Its block masks, a few numbers per 128 x 128 scores, are left out."""
    assert not dropout
    of = _aten._scaled_dot_product_fused_attention_overrideable
    out: Tensor = of(q, k, v, None, 0.0, True, scale=scores.scale)[0]
    return out


class _RmsNorm(Function):
    """Torch's fused RMSNorm for GPUs; other devices compose it from several operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # above autograd it is decomposed
            y, rstd = _aten._fused_rms_norm(x, list(weight.shape), weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, rstd = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        grad_x, grad_weight = _aten._fused_rms_norm_backward(
            grad, x, list(weight.shape), rstd, weight, wanted
        )
        return grad_x, grad_weight, None


def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, offset: bool = False
) -> Tensor:
    if centred or offset:
        return torch_norm(x, weight, bias, eps, centred, offset)
    return _RmsNorm.apply(x, weight, eps)


def _fused_rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Allocate the output of a fused RMSNorm, and one number per row."""
    rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return torch.empty_like(x), x.new_empty(rows, dtype=loss_dtype(x.dtype))


def _dropout(x: Tensor, p: float) -> Tensor:
    """Apply torch's fused dropout for GPUs, which saves a boolean mask."""
    found: Tensor = torch.native_dropout(x, p, True)[0]
    return found


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Stand in for inductor's rotation: one kernel writes a new tensor, another copies it back."""
    return x.copy_(torch.mul(x, cos, out=torch.empty(x.shape, dtype=x.dtype, device=x.device)))


class _Swiglu(Function):
    """Stand-in for inductor's SwiGLU: one kernel per pass; only gate and up are saved."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = both.chunk(2, dim=-1)
        return gate * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        return _as_parts(both, grad)


def _as_parts(both: Tensor, grad: Tensor) -> Tensor:
    """Stand in for the backward kernel: gate and up [..., 2 f], gradient [..., f] -> [..., 2 f]."""
    out = torch.empty_like(both)
    parts = [x.unflatten(-1, (both.shape[-1] // grad.shape[-1], -1)) for x in (both, out)]
    torch.mul(parts[0], grad.unsqueeze(-2), out=parts[1])
    return out


class _Loss:
    """Stand-in for :class:`InductorLoss`: one kernel reads the logits, one overwrites them with
    gradients, and sums are reduced over the ranks."""

    wide = False

    def local_stats(self, logits: Tensor, labels: Labels) -> Tensor:
        out = logits.new_empty(3, len(logits), dtype=loss_dtype(logits.dtype))
        torch.sum(logits, -1, dtype=out.dtype, out=out[0])
        return out

    def results(
        self, logits: Tensor, labels: Labels, gathered: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = gathered.sum((0, 1))
        return losses, torch.mul(logits, weights.unsqueeze(-1), out=logits)


class _Rows:
    """Stand-in for :class:`InductorRows`: one forward kernel per result, two backward kernels."""

    def activate_and_weight(self, wide: Tensor, weight: Tensor, activation: Activate) -> Tensor:
        parts = activation.split(wide)
        return torch.mul(parts[0], parts[-1])

    def gradients(
        self, wide: Tensor, weight: Tensor, product: Callable[[], Tensor], activation: Activate
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_wide, grad = torch.empty_like(wide), product()
        inner, of_weight = torch.empty_like(grad), torch.empty_like(weight)
        torch.mul(activation.split(wide)[0], grad, out=inner)
        parts = [x.unflatten(-1, (-1, grad.shape[-1])) for x in (wide, grad_wide)]
        torch.mul(parts[0], grad.unsqueeze(-2), out=parts[1])
        return inner, grad_wide, of_weight

    def unpermute(self, rows: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        out = rows.new_empty(len(slots), rows.shape[-1], dtype=dtype)
        torch.sum(rows, 0, dtype=dtype, out=out[0])
        return out


# Memory inside kernels. The figures follow from the sources of torch 2.13.

_FLASH_ROWS = 128
"""Multiple to which flash attention pads sequences (flash_attn/flash_api.cpp, mha_bwd)."""
_EFFICIENT_ROWS, _EFFICIENT_WIDTH = 128, 64
"""Largest block (rows, columns) of the memory-efficient backward
(mem_eff_attention/kernel_backward.h)."""
_FP32 = 4


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_sums(heads: int, rows: int, head_dim: int) -> int:
    """Return the bytes of flash's fp32 buffers: summed query gradients, and a number per row."""
    width = _up(head_dim, 32) if head_dim <= 192 else 256
    return _FP32 * heads * rows * (width + 1)


def _copied(*tensors: Tensor) -> int:
    """Return the bytes of copies that a kernel makes of non-contiguous tensors."""
    return sum(x.numel() * x.element_size() for x in tensors if not x.is_contiguous())


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *_: Any, **__: Any
) -> int:
    """Return the workspace for q [b, heads, s, d]: fp32 sums; copies [b, s, heads, d] of gradient
    and output; with fewer key heads, gradients of keys and values for every query head."""
    b, heads, s, d = q.shape
    expanded = 2 * b * heads * k.shape[2] * d * k.element_size() if k.shape[1] < heads else 0
    copies = _copied(grad.transpose(1, 2), out.transpose(1, 2))
    return _flash_sums(b * heads, _up(s, _FLASH_ROWS), d) + expanded + copies


def _packed_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Return the workspace for packed q [rows, heads, d]; fp32 sums have one more block per
    sequence."""
    rows, heads, d = q.shape
    expanded = 2 * len(k) * heads * d * k.element_size() if k.shape[1] < heads else 0
    padded = rows + _FLASH_ROWS * (len(ends) - 1)
    return _flash_sums(heads, padded, d) + expanded + _copied(grad, out)


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Return the workspace for q [b, heads, s, d]: a number per row, a copy of the gradient, and
    for bf16 and fp16 the queries' gradient in fp32; with more than 128 columns also the gradients
    of keys and values."""
    b, heads, s, d = q.shape
    sums = 0
    if q.element_size() < _FP32:
        lengths = [s] if d <= _EFFICIENT_ROWS else [s, k.shape[2], k.shape[2]]
        sums = _up(d, _EFFICIENT_WIDTH) * sum(_up(n, _EFFICIENT_ROWS) for n in lengths)
    return _FP32 * b * heads * (s + sums) + _copied(grad.transpose(1, 2))


def _cudnn_backward(grad: Tensor, q: Tensor, *_: Any, **__: Any) -> int:
    """Return the workspace, assumed to be equal to flash's sums: cuDNN's sources are closed."""
    b, heads, s, d = q.shape
    return _flash_sums(b * heads, _up(s, _FLASH_ROWS), d)


def _flex_backward(grad: Tensor, q: Tensor, *_: Any, **__: Any) -> int:
    """Return the bytes of two numbers per row, as inductor lowers flex_attention_backward."""
    return 2 * _FP32 * q.shape[:-1].numel()


STAND_INS: Mapping[Any, Callable[..., Any]] = {_aten._fused_rms_norm.default: _fused_rms_norm}

WORKSPACES: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._flash_attention_backward.default: _packed_flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_fused_attention_overrideable_backward.default: _flex_backward,
}
"""Functions from an operation's arguments to the bytes that it allocates only during the call.

Memory of cuBLAS and NCCL, which a process keeps, is in :mod:`megapipe.plan.communicators`. Left out
are flash's forward, which needs memory only if it has too few blocks for the GPU, and the partial
sums of norm weights' gradients, a few rows.
"""
