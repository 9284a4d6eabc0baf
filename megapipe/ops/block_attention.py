"""Attention of a block of queries to a block of keys, with what it takes to join the results.

Beside its output a block gives the logarithm of each row's sum of exponentials (LSE), by which
outputs over other keys are merged with it. Its backward takes output and LSE over *all* keys: then
gradients of blocks add up to those of the whole.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class TileKernel(Protocol):
    """Shapes: q, out and their gradients [b, heads, s, d]; k, v and theirs [b, groups, t, d]; lse
    [b, heads, s], in fp32 (fp64 for fp64). `causal`: s = t, and a query sees the keys of its row
    and those before it; otherwise it sees all."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, from output and LSE over all keys of the rows."""


class CpuFlash:
    """torch's flash attention for CPUs, which takes any type and fewer key heads."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return found

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found: tuple[Tensor, Tensor, Tensor] = of(grad, q, k, v, out, lse, 0.0, causal, scale=scale)
        return found


class MathTile:
    """Written out, in fp32 (fp64 for fp64): for any device, with a block's scores in memory."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        x, _, wide_v = self._scores(q, k, v, causal, scale)
        lse = x.logsumexp(-1)
        out = (x - lse.unsqueeze(-1)).exp() @ wide_v.unsqueeze(2)
        return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, wide_k, wide_v = self._scores(q, k, v, causal, scale)
        grouped = (k.shape[1], -1)
        wide_q, wide_grad, wide_out = (
            each.to(x.dtype).unflatten(1, grouped) for each in (q, grad, out)
        )
        shares = (x - lse.unflatten(1, grouped).unsqueeze(-1)).exp()
        grad_v = (shares.mT @ wide_grad).sum(2)
        mean = (wide_grad * wide_out).sum(-1, keepdim=True)
        grad_x = (wide_grad @ wide_v.unsqueeze(2).mT - mean) * shares * _scale(q, scale)
        grad_q = (grad_x @ wide_k.unsqueeze(2)).flatten(1, 2)
        grad_k = (grad_x.mT @ wide_q).sum(2)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)

    def _scores(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Input of the softmax [b, groups, n, s, t], and wide keys and values."""
        high = accumulation(q.dtype)
        k, v = k.to(high), v.to(high)
        x = q.to(high).unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * _scale(q, scale)
        if causal:
            seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
            x = x.masked_fill(~seen, float("-inf"))
        return x, k, v


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """The type in which results of blocks are added up."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Take a block's output into `out`, and its LSE into `lse`, over other keys of the same rows.

    out [b, heads, s, d] in the type of accumulation, lse [b, heads, s]: -inf for rows that have
    seen nothing yet, whose output is 0.
    """
    total = torch.logaddexp(lse, block_lse)
    # of two rows that have seen nothing, a difference of infinities would be NaN
    empty = total.isneginf()
    known = total.masked_fill(empty, 0.0)
    out.mul_((lse - known).exp_().unsqueeze(-1))
    out.addcmul_(block.to(out.dtype), (block_lse - known).exp_().unsqueeze(-1))
    lse.copy_(total)


def output_along(grad: Tensor, dots: Tensor) -> Tensor:
    """Rows along `grad` [..., d] whose dot products with it are `dots` [...], in its type.

    The backward of a block uses the output in no other way, so these rows may stand for it where
    the dot products alone are known.
    """
    wide = grad.to(dots.dtype)
    largest = torch.linalg.vector_norm(wide, math.inf, -1, keepdim=True)
    unit = wide / largest.masked_fill(largest == 0, 1.0)  # of tiny rows the squares would be 0
    squares = torch.linalg.vector_norm(unit, 2, -1, keepdim=True).square_()
    factor = dots.unsqueeze(-1) / (largest * squares)
    return unit.mul_(factor.masked_fill_(largest == 0, 0.0)).to(grad.dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    return scale or 1 / math.sqrt(q.shape[-1])
