"""Causal self-attention with heads split over tp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from megapipe.config.model import ModelConfig
from megapipe.layers.dropout import dropout_seed
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.norm import Norm
from megapipe.layers.parameter import Sharding
from megapipe.layers.rng import seeded
from megapipe.model.gpt.parameters import Named, layer_of
from megapipe.model.gpt.rotary import Tables
from megapipe.model.gpt.scores import scores_of
from megapipe.ops.rotary import RotaryKernel


class _Turned(Function):
    """Rotary embedding of a part of `x`, in place. The backward rotates the gradient back, in place
    too.

    `part`: function that returns the view of `x` to rotate, [s, b, ..., d]. Only the tables are
    saved. No other function may use or save `x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        part: Callable[[Tensor], Tensor],
        rotate: RotaryKernel,
        rotary: Tables,
        skip_output: bool,
    ) -> Tensor:
        ctx.part, ctx.rotate, ctx.rotary = part, rotate, rotary
        if not skip_output:
            rotate(part(x), *rotary, 1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        # no other function uses this gradient: parts of it were joined, or attention made it
        cos, sin = ctx.rotary
        ctx.rotate(ctx.part(grad), cos, sin, -1)
        return grad, None, None, None, None


def merge_heads(y: Tensor) -> Tensor:
    """Join the heads of each position: [b, heads, s, d] -> [s, b, heads * d]."""
    return y.permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """Causal self-attention in two steps: :meth:`project`, then :meth:`forward` of its output.

    Rows of the qkv weight are grouped by key/value head: the group's query heads, its key, its
    value. So each tp rank has whole groups in a contiguous range of rows if tp divides kv_heads.
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
        self.rotary_width = config.rotary_width
        self.scores = scores_of(config, layer, sharding.tp.index, sharding.tp.size)
        name = f"layers.{layer}.attention"
        self.qkv = ColumnParallelLinear(sharding, *layer_of(parameters, f"{name}.qkv"))
        self.out = RowParallelLinear(sharding, *layer_of(parameters, f"{name}.out"))
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm:
            self.q_norm = self._head_norm(parameters, f"{name}.q_norm")
            self.k_norm = self._head_norm(parameters, f"{name}.k_norm")

    def project(self, x: Tensor, rotary: Tables | None, skip_output: bool = False) -> Tensor:
        """Project normed [s(/tp), b, h] -> [s, b, (heads + 2 kv_heads) d / tp].

        Queries and keys are rotated with the tables `rotary`. With q/k norms :meth:`forward`
        rotates them instead, after the norms. With `skip_output` the output has no value.
        """
        qkv = self.qkv(x, skip_output)
        if rotary is None or self.q_norm is not None:
            return qkv
        return _Turned.apply(qkv, self.rotated_view, self.rotate, rotary, skip_output)

    def forward(
        self,
        qkv: Tensor,
        mb: MicroBatch,
        rotary: Tables | None = None,
        cache: KVCache | None = None,
        skip_output: bool = False,
    ) -> Tensor:
        """Attend, given the output of :meth:`project`, and project -> [s(/tp), b, h].

        `cache`: keys and values of earlier slices. With `skip_output` the output has no value.
        """
        q, k, v = self.heads(qkv) if self.q_norm is None else self._normed(qkv, rotary)
        context = self.sharding.kernels.context
        shares = self.q_norm is None and self.queries > 1 and self.groups > 1
        if shares and (cache is None or context is not None):
            k, v = k.contiguous(), v.contiguous()  # q is a copy, so this frees qkv
        if context is not None:
            y = context.attend(q, k, v, mb, self.scores, self.layer, cache)
            return self.out(y.flatten(2), skip_output)
        if cache is not None:
            k, v = cache.extend(self.layer, mb.start, k, v)
        y = self._attend(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), mb)
        return self.out(merge_heads(y), skip_output)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv: queries [s, b, heads / tp, d], keys and values [s, b, kv_heads / tp, d]."""
        # split's backward joins the gradients; that of a slice would fill all of qkv
        q, k, v = self._split(qkv)
        return q.reshape(*q.shape[:2], -1, self.head_dim), k.squeeze(3), v.squeeze(3)

    def _normed(self, qkv: Tensor, rotary: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split qkv into queries, keys and values; norm and rotate queries and keys."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        q, k, v = self._split(qkv)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = (
                _Turned.apply(x, self._rotated_width, self.rotate, rotary, False) for x in (q, k)
            )
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def rotated_view(self, qkv: Tensor) -> Tensor:
        """Return the view of :meth:`project`'s output that is rotated, [s, b, groups, n, d]."""
        return self._rotated_width(self._grouped(qkv)[..., :-1, :])

    def _rotated_width(self, x: Tensor) -> Tensor:
        return x[..., : self.rotary_width]

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return self._grouped(qkv).split((self.queries, 1, 1), dim=3)

    def _head_norm(self, parameters: Named, name: str) -> Norm:
        return Norm(
            self.sharding,
            parameters[f"{name}.weight"],
            centred=False,
            eps=self.config.norm_eps,
            offset=self.config.zero_centered_norm,
            kernel=self.sharding.kernels.head_norm,
        )

    def _grouped(self, qkv: Tensor) -> Tensor:
        return qkv.view(*qkv.shape[:2], self.groups, self.queries + 2, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mb: MicroBatch) -> Tensor:
        """Attend with q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d].

        The queries are the last s of the t positions.
        """
        p = self.config.dropout if self.training else 0.0
        seed = dropout_seed(mb, "attention", self.layer, self.sharding.tp.index)
        with seeded(q.device, seed) if p else nullcontext():
            return self.sharding.kernels.attention(q, k, v, p, mb.documents, self.scores)
