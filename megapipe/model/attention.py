"""Causal self-attention with heads split over tp."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

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
    """cos and sin [s, 1, 1, d] of the rotary embedding (Su et al., 2104.09864), half-rotated.

    Computed in fp32 (fp64 for fp64), then cast.
    """
    high = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=high, device=device) / head_dim
    angle = torch.outer(torch.arange(length, dtype=high, device=device), base**-exponent)
    angle = torch.cat((angle, angle), dim=-1).view(length, 1, 1, head_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [s, b, heads, d] by position; the halves of d are the two coordinates."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h].

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
        x: Tensor,
        mb: MicroBatch,
        rotary: tuple[Tensor, Tensor] | None,
        carry: Carry | None = None,
    ) -> Tensor:
        """`rotary` is for the positions of x; `carry` is there where x is a slice."""
        qkv = self.qkv(x)
        s, b, _ = qkv.shape
        qkv = qkv.view(s, b, self.groups, self.queries + 2, self.head_dim)
        q = qkv[..., : self.queries, :].reshape(s, b, -1, self.head_dim)
        k, v = qkv[..., self.queries, :], qkv[..., self.queries + 1, :]  # [s, b, groups, d]
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        if carry is not None:
            k, v = carry.extend(self.layer, mb.start, k, v)
        y = self._attend(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), mb)
        return self.out(y.permute(2, 0, 1, 3).reshape(s, b, -1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mb: MicroBatch) -> Tensor:
        """q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d].

        The queries are the last s of the t positions.
        """
        s, t = q.shape[2], k.shape[2]
        p = self.config.dropout if self.training else 0.0
        seed = dropout_seed(mb, "attention", self.layer, self.sharding.tp.index)
        with seeded(q.device, seed) if p else nullcontext():
            return scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=causal_lower_right(s, t) if s < t else None,
                is_causal=s == t,
                enable_gqa=self.queries > 1,
                dropout_p=p,
            )
