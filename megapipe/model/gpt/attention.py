"""Causal self-attention with heads split over tp."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megapipe.layers.dropout import dropout_seed
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.layers.rng import seeded
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.parameters import Named, layer_of


def rotary_tables(
    length: int, head_dim: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [s, 1, 1, 1, d] of the rotary embedding (Su et al., 2104.09864), half-rotated.

    Computed in fp32 (fp64 for fp64), then cast.
    """
    high = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=high, device=device) / head_dim
    angle = torch.outer(torch.arange(length, dtype=high, device=device), base**-exponent)
    angle = torch.cat((angle, angle), dim=-1).view(length, 1, 1, 1, head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class _Turned(Function):
    """Rotates queries and keys in place, and their gradients back; only the tables are kept.

    No other function may use or save its input.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, attention: Attention, rotary: tuple[Tensor, Tensor], graph_only: bool
    ) -> Tensor:
        ctx.attention, ctx.rotary = attention, rotary
        if not graph_only:
            attention.rotate(attention.turning(qkv), *rotary, 1)
        return qkv.view_as(qkv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # queries, keys and values had their gradients joined in this one, which nobody else has
        cos, sin = ctx.rotary
        ctx.attention.rotate(ctx.attention.turning(grad), cos, sin, -1)
        return grad, None, None, None


def joined(y: Tensor) -> Tensor:
    """The heads of each position in one row: [b, heads, s, d] -> [s, b, heads * d]."""
    return y.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """Causal self-attention in two steps: :meth:`project` of [s(/tp), b, h], a call does the rest.

    Rows of the qkv weight are ordered by key/value head: its query heads, its key, its value; so
    a contiguous range of rows is a whole number of groups, for any tp that divides kv_heads.
    """

    def __init__(
        self, sharding: Sharding, config: ModelConfig, layer: int, parameters: Named
    ) -> None:
        super().__init__()
        assert config.kv_heads is not None
        assert config.head_dim is not None
        self.sharding = sharding
        self.rotate = sharding.kernels.rotary
        self.config = config
        self.layer = layer
        self.groups = config.kv_heads // sharding.tp.size
        self.queries = config.heads // config.kv_heads
        self.head_dim = config.head_dim
        name = f"layers.{layer}.attention"
        self.qkv = ColumnParallelLinear(sharding, *layer_of(parameters, f"{name}.qkv"))
        self.out = RowParallelLinear(sharding, *layer_of(parameters, f"{name}.out"))

    def project(
        self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, graph_only: bool = False
    ) -> Tensor:
        """Normed [s(/tp), b, h] -> [s, b, (heads + 2 kv_heads) d / tp], rotated by `rotary`.

        `rotary` are the tables of these positions. With `graph_only` the output has no value.
        """
        qkv = self.qkv(x, graph_only)
        return qkv if rotary is None else _Turned.apply(qkv, self, rotary, graph_only)

    def forward(
        self, qkv: Tensor, mb: MicroBatch, cache: KVCache | None = None, graph_only: bool = False
    ) -> Tensor:
        """The output of :meth:`project` -> [s(/tp), b, h].

        `cache` is there where these positions are a slice. With `graph_only` the output has no
        value.
        """
        q, k, v = self.heads(qkv)
        if cache is not None:
            k, v = cache.extend(self.layer, mb.start, k, v)
        elif self.queries > 1 and self.groups > 1:  # q is a copy: let go of what it comes from
            k, v = k.contiguous(), v.contiguous()
        y = self._attend(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), mb)
        return self.out(joined(y), graph_only)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, heads / tp, d], keys and values [s, b, kv_heads / tp, d]."""
        # by split, whose backward joins the gradients; that of a slice would fill all of qkv
        q, k, v = self._grouped(qkv).split((self.queries, 1, 1), dim=3)
        return q.reshape(*q.shape[:2], -1, self.head_dim), k.squeeze(3), v.squeeze(3)

    def turning(self, qkv: Tensor) -> Tensor:
        """View of the queries and keys in the output of :meth:`project`, [s, b, groups, n, d]."""
        return self._grouped(qkv)[..., :-1, :]

    def _grouped(self, qkv: Tensor) -> Tensor:
        return qkv.view(*qkv.shape[:2], self.groups, self.queries + 2, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mb: MicroBatch) -> Tensor:
        """q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d].

        The queries are the last s of the t positions.
        """
        p = self.config.dropout if self.training else 0.0
        seed = dropout_seed(mb, "attention", self.layer, self.sharding.tp.index)
        with seeded(q.device, seed) if p else nullcontext():
            return self.sharding.kernels.attention(q, k, v, p, mb.documents)
