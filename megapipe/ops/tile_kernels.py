"""GPU kernels that compute attention tiles: torch's, and flash-attn's.

Each kernel has its own shape of LSE, and its own rules about heads and memory. The classes adapt
the kernels to the interface of :class:`~megapipe.ops.tile_attention.TileKernel`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LSE_MULTIPLE = 32
"""Number of queries whose LSE the efficient kernel reads at a time."""


class Flash:
    """torch's flash attention for GPUs, in bf16 and fp16; KV heads of GQA are not repeated."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        of = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = of(q, k, v, 0.0, causal, scale=scale)
        return out, lse

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
        sizes = q.shape[2], k.shape[2]
        found: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad,
                q,
                k,
                v,
                out,
                lse.contiguous(),
                None,
                None,
                *sizes,
                0.0,
                causal,
                *_no_dropout(q, torch.uint64),
                scale=scale,
            )
        )
        return found


class Cudnn:
    """cuDNN's flash attention, in bf16 and fp16; KV heads of GQA are not repeated."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        of = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = of(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse.view(q.shape[:3])  # from [b, heads, s, 1]

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
        sizes = q.shape[2], k.shape[2]
        found: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                grad,
                q,
                k,
                v,
                out,
                lse.contiguous().unsqueeze(-1),
                *_no_dropout(q, torch.int64),
                None,
                None,
                None,
                *sizes,
                0.0,
                causal,
                scale=scale,
            )
        )
        return found


class Efficient:
    """torch's memory-efficient attention, which also takes fp32; KV heads of GQA are repeated."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        k, v = (_copied(x, q.shape[1]) for x in (k, v))
        of = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = of(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

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
        groups, heads, s = k.shape[1], q.shape[1], q.shape[2]
        # padding rows see nothing: exp(x - inf) is 0
        lse = functional.pad(lse, (0, -s % LSE_MULTIPLE), value=math.inf)
        # the bf16 and fp16 kernels read `out` as [b, s, heads, d], whatever its strides say
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        of = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        grad_q, *of_keys, _ = of(
            grad,
            q,
            _copied(k, heads),
            _copied(v, heads),
            None,
            out,
            lse.contiguous(),
            *_no_dropout(q, torch.int64),
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        grad_k, grad_v = (x.unflatten(1, (groups, -1)).sum(2) for x in of_keys)
        return grad_q, grad_k, grad_v


class FlashAttnTile:
    """Tri Dao's flash-attn 2 (2307.08691); `interface` is flash_attn.flash_attn_interface."""

    def __init__(self, interface: Any) -> None:
        self.interface = interface

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.interface.flash_attn_func(
            *(x.transpose(1, 2) for x in (q, k, v)),
            softmax_scale=scale,
            causal=causal,
            return_attn_probs=True,
        )
        return out.transpose(1, 2), lse

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
        rows = [x.transpose(1, 2) for x in (grad, q, k, v, out)]  # [b, s, heads, d]
        found = [torch.empty_like(x) for x in rows[1:4]]
        self.interface._flash_attn_backward(
            *rows,
            lse.contiguous(),
            *found,
            dropout_p=0.0,
            softmax_scale=scale or 1 / math.sqrt(q.shape[-1]),
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in found)
        return grad_q, grad_k, grad_v


def _no_dropout(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a random state for kernels that ask for one; without dropout nothing is drawn."""
    seed = torch.empty(2, dtype=dtype, device=like.device)
    return seed, torch.empty(0, dtype=dtype, device=like.device)


def _copied(x: Tensor, heads: int) -> Tensor:
    """Repeat the KV heads of x [b, groups, t, d], so that each of `heads` query heads has one."""
    copies = heads // x.shape[1]
    return x.repeat_interleave(copies, dim=1) if copies > 1 else x
