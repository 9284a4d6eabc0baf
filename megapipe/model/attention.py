"""Causal self-attention with heads split over tp."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megapipe.model.carry import Carry
from megapipe.model.config import ModelConfig
from megapipe.model.dropout import dropout_seed
from megapipe.model.microbatch import MicroBatch
from megapipe.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, residual_std
from megapipe.tensor_parallel.parameter import Sharding
from megapipe.tensor_parallel.rng import seeded


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


class _Rotate(Function):
    """Its own backward, with the angle negated; nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.tables = cos, sin
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.tables
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    y = x * cos
    (x1, x2), (y1, y2), (sin1, sin2) = (t.chunk(2, dim=-1) for t in (x, y, sin))
    y1.addcmul_(x2, sin1, value=-sign)
    y2.addcmul_(x1, sin2, value=sign)
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [s, b, ..., d] by position; the halves of d are the two coordinates."""
    return _Rotate.apply(x, cos, sin)


def joined(y: Tensor) -> Tensor:
    """The heads of each position in one row: [b, heads, s, d] -> [s, b, heads * d]."""
    return y.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """Causal self-attention in two steps: `qkv` projects [s(/tp), b, h], a call does the rest.

    Rows of the qkv weight are ordered by key/value head: its query heads, its key, its value; so
    a contiguous range of rows is a whole number of groups, for any tp that divides kv_heads.
    """

    def __init__(self, sharding: Sharding, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.kv_heads is not None
        assert config.head_dim is not None
        self.sharding = sharding
        self.config = config
        self.layer = layer
        self.groups = config.kv_heads // sharding.tp.size
        self.queries = config.heads // config.kv_heads
        self.head_dim = config.head_dim
        name = f"layers.{layer}.attention"
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = ColumnParallelLinear(
            sharding, f"{name}.qkv", (rows, config.hidden), bias=config.bias, std=config.init_std
        )
        self.out = RowParallelLinear(
            sharding,
            f"{name}.out",
            (config.hidden, config.heads * config.head_dim),
            bias=config.bias,
            std=residual_std(config.init_std, config.layers),
        )

    def forward(
        self,
        qkv: Tensor,
        mb: MicroBatch,
        rotary: tuple[Tensor, Tensor] | None,
        carry: Carry | None = None,
        graph_only: bool = False,
    ) -> Tensor:
        """The output of `qkv`, [s, b, (heads + 2 kv_heads) d / tp], -> [s(/tp), b, h].

        `rotary` is for the positions of these; `carry` is there where they are a slice. With
        `graph_only` the output has no value.
        """
        q, k, v = self.heads(qkv, rotary)
        if carry is not None:
            k, v = carry.extend(self.layer, mb.start, k, v)
        y = self._attend(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), mb)
        return self.out(joined(y), graph_only)

    def heads(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, heads / tp, d], keys and values [s, b, kv_heads / tp, d], rotated."""
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, self.groups, self.queries + 2, self.head_dim)
        # by split, whose backward joins the gradients; that of a slice would fill all of qkv
        if rotary is None:
            q, k, v = qkv.split((self.queries, 1, 1), dim=3)
        else:
            qk, v = qkv.split((self.queries + 1, 1), dim=3)
            q, k = rotate(qk, *rotary).split((self.queries, 1), dim=3)
        return q.reshape(s, b, -1, self.head_dim), k.squeeze(3), v.squeeze(3)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mb: MicroBatch) -> Tensor:
        """q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d].

        The queries are the last s of the t positions.
        """
        p = self.config.dropout if self.training else 0.0
        seed = dropout_seed(mb, "attention", self.layer, self.sharding.tp.index)
        with seeded(q.device, seed) if p else nullcontext():
            return self.sharding.kernels.attention(q, k, v, p, mb.documents)
