"""GPU kernels that compute many attention tiles in one call: torch's, and flash-attn's.

The tiles' queries are concatenated, and so are their keys, with cumulative lengths (varlen). Each
tile's results and gradients equal those of a :class:`~megapipe.ops.tile_attention.TileKernel`.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.ops.documents import VarlenLengths
from megapipe.ops.tile_attention import TileKernel


class PackedTileKernel(Protocol):
    """Kernel of many attention tiles: q, out and their gradients [rows, heads, d]; k, v and their
    gradients [keys, groups, d]; lse [heads, rows], in fp32. `runs` has the lengths of each tile
    (cu_seqlens). With `causal` a tile has as many queries as keys, and a query sees its own and
    earlier keys of the tile; otherwise it sees all keys of the tile."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
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
        runs: VarlenLengths,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v from this call's scores. `out` and `lse` are the
        queries' results over all their keys, including keys of other calls."""


class OneByOne:
    """Packed kernel that calls a tile kernel for each tile: the reference for the other kernels.
    The host waits for the GPU to read the tiles' lengths."""

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
    """torch's flash attention for GPUs, in bf16 and fp16; KV heads of GQA are not repeated."""

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
    """Tri Dao's flash-attn 2 (2307.08691); `interface` is flash_attn.flash_attn_interface."""

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
    """Set max_seqlen_q to at least 2. With 1, flash attention swaps heads and queries and runs
    other kernels, which the self-check has not loaded."""
    return runs._replace(max_seqlen_q=max(2, runs.max_seqlen_q))


def _blocks(runs: VarlenLengths) -> list[tuple[slice, slice]]:
    """Return the range of queries and the range of keys of each tile."""
    q_ends, k_ends = runs.cu_seqlens_q.tolist(), runs.cu_seqlens_k.tolist()
    sides = [[slice(*pair) for pair in pairwise(ends)] for ends in (q_ends, k_ends)]
    return list(zip(*sides, strict=True))


def _heads(rows: Tensor) -> Tensor:
    """Reshape [n, heads, d] -> [1, heads, n, d]."""
    return rows.transpose(0, 1).unsqueeze(0)
