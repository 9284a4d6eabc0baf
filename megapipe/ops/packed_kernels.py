"""Kernels for GPUs that compute many blocks of attention in one call: torch's, and flash-attn's.

The rows of these blocks follow each other, with where each block ends: what others call variable
lengths. Each block's result, and its backward, are as those of a
:class:`~megapipe.ops.block_attention.TileKernel`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.ops.block_attention import TileKernel
from megapipe.ops.documents import VarlenLengths


class PackedTileKernel(Protocol):
    """Shapes: q, out and their gradients [rows, heads, d]; k, v and theirs [keys, groups, d]; lse
    [heads, rows], in fp32. Each of the `runs` is a block, and has queries and keys; `causal`: of
    each as many, and a query sees the keys of its row and those before it in the block; otherwise
    it sees all of the block."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
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
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, from output and LSE over all keys of the rows."""


class OneByOne:
    """Each block by a kernel of one: what the others are compared with. The host reads where blocks
    end."""

    def __init__(self, kernel: TileKernel) -> None:
        self.kernel = kernel

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        found = [
            self.kernel.forward(_heads(q[rows]), _heads(k[keys]), _heads(v[keys]), causal, scale)
            for rows, keys in _blocks(runs)
        ]
        out, lse = (
            torch.cat([x.squeeze(0) for x in each], dim=1) for each in zip(*found, strict=True)
        )
        return out.transpose(0, 1), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            self.kernel.backward(
                _heads(grad[rows]),
                _heads(q[rows]),
                _heads(k[keys]),
                _heads(v[keys]),
                _heads(out[rows]),
                lse[:, rows].unsqueeze(0),
                causal,
                scale,
            )
            for rows, keys in _blocks(runs)
        ]
        grad_q, grad_k, grad_v = (
            torch.cat([x.squeeze(0) for x in each], dim=1).transpose(0, 1)
            for each in zip(*found, strict=True)
        )
        return grad_q, grad_k, grad_v


class PackedFlash:
    """torch's flash attention for GPUs: bf16 and fp16, fewer key heads as they are."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        of = torch.ops.aten._flash_attention_forward
        out, lse, *_ = of(q, k, v, *_at_least_two(runs), 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            *_at_least_two(runs),
            0.0,
            causal,
            torch.empty(2, dtype=torch.uint64, device=q.device),  # nothing is drawn from it
            torch.empty(0, dtype=torch.uint64, device=q.device),
            scale=scale,
        )
        return found


class PackedFlashAttn:
    """Tri Dao's flash-attn 2 (2307.08691), `interface` being flash_attn.flash_attn_interface."""

    def __init__(self, interface: Any) -> None:
        self.interface = interface

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self.interface.flash_attn_varlen_func(
            q,
            k,
            v,
            *_at_least_two(runs),
            softmax_scale=scale,
            causal=causal,
            return_attn_probs=True,
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = found = [torch.empty_like(x) for x in (q, k, v)]
        self.interface._flash_attn_varlen_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            *found,
            *_at_least_two(runs),
            dropout_p=0.0,
            softmax_scale=scale or 1 / math.sqrt(q.shape[-1]),
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return grad_q, grad_k, grad_v


def _at_least_two(runs: VarlenLengths) -> VarlenLengths:
    """The same, said to have a block of two queries at least: so flash takes the same code for
    blocks of any lengths, and what its check has loaded is all that is ever called. Where no block
    had more than one query, heads would take the place of queries, in code of its own."""
    return runs._replace(max_seqlen_q=max(2, runs.max_seqlen_q))


def _blocks(runs: VarlenLengths) -> list[tuple[slice, slice]]:
    """The rows of queries and of keys of each block."""
    q_ends, k_ends = runs.cu_seqlens_q.tolist(), runs.cu_seqlens_k.tolist()
    sides = [[slice(*pair) for pair in pairwise(ends)] for ends in (q_ends, k_ends)]
    return list(zip(*sides, strict=True))


def _heads(rows: Tensor) -> Tensor:
    """[n, heads, d] -> [1, heads, n, d]."""
    return rows.transpose(0, 1).unsqueeze(0)
