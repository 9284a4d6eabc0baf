"""Attention of one tile of queries and keys, with the LSE that merges tiles.

Besides its output, a tile returns the log-sum-exp of each row of scores (LSE), with which outputs
over different keys are merged. A tile's backward takes output and LSE over *all* keys, so that the
tiles' gradients add up to the gradients of the whole attention.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor


class TileKernel(Protocol):
    """Kernel of one attention tile: q, out and their gradients [b, heads, s, d]; k, v and their
    gradients [b, groups, t, d]; lse [b, heads, s], in fp32 (fp64 for fp64). With `causal`, s = t
    and a query sees its own and earlier keys; otherwise it sees all keys."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return output and LSE."""

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
        """Return the gradients of q, k and v from this tile's scores. `out` and `lse` are the
        queries' results over all their keys, including keys of other tiles."""


class CpuFlash:
    """torch's flash attention for CPUs, for any type; KV heads of GQA are not repeated."""

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
    """Plain operations in fp32 (fp64 for fp64), for any device; the tile's scores take memory."""

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
        """Return the input of the softmax [b, groups, n, s, t], and keys and values in its type."""
        high = accumulation(q.dtype)
        k, v = k.to(high), v.to(high)
        x = q.to(high).unflatten(1, (k.shape[1], -1)) @ k.unsqueeze(2).mT * _scale(q, scale)
        if causal:
            seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
            x = x.masked_fill(~seen, float("-inf"))
        return x, k, v


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which results of tiles are accumulated: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge a tile's output and LSE into `out` and `lse`, results of these queries for other keys.

    `out` [b, heads, s, d] is in the accumulation type; `lse` is [b, heads, s]. Queries that have
    seen no key yet have lse -inf and output 0.
    """
    total = torch.logaddexp(lse, block_lse)
    # if neither has seen a key, a difference of infinities would be NaN
    empty = total.isneginf()
    known = total.masked_fill(empty, 0.0)
    out.mul_((lse - known).exp_().unsqueeze(-1))
    out.addcmul_(block.to(out.dtype), (block_lse - known).exp_().unsqueeze(-1))
    lse.copy_(total)


def output_along(grad: Tensor, dots: Tensor) -> Tensor:
    """Return vectors along `grad` [..., d] whose dot products with `grad` are `dots` [...].

    A tile's backward uses the output only in its dot product with `grad`, so these vectors can
    replace the output if only the products are known.
    """
    wide = grad.to(dots.dtype)
    largest = torch.linalg.vector_norm(wide, math.inf, -1, keepdim=True)
    unit = wide / largest.masked_fill(largest == 0, 1.0)  # squares of tiny rows would be 0
    squares = torch.linalg.vector_norm(unit, 2, -1, keepdim=True).square_()
    factor = dots.unsqueeze(-1) / (largest * squares)
    return unit.mul_(factor.masked_fill_(largest == 0, 0.0)).to(grad.dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    return scale or 1 / math.sqrt(q.shape[-1])
