"""Linear layers with low-rank adapters (LoRA; Hu et al., 2106.09685).

An adapter is two of the project's own linear layers, one after the other, so splits over tensor
parallelism and by sequence, recomputation and weight gradients that wait for ``W`` are theirs.
Beside a column-parallel layer the first one, A, is held by every tp rank and applied to the
positions that the rank has, and B is column-parallel; beside a row-parallel layer A is
row-parallel, and B is held by every rank. So what an adapter exchanges over tp has its rank's
values per token, and not as many as the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Function

from megapipe.layers.linear import (
    ColumnParallelLinear,
    ParallelLinear,
    RowParallelLinear,
    replicated_linear,
)
from megapipe.layers.lora_specs import RowSlice
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import ParameterSpec


class AdapterSpec(NamedTuple):
    """The matrices of an adapter, and the rows of the layer that it adds to."""

    a: ParameterSpec
    b: ParameterSpec
    rows: RowSlice


class Adapter(nn.Module):
    """scale (x A^T) B^T, split as the layer beside it is; with `graph_only` there is no product."""

    def __init__(self, sharding: Sharding, spec: AdapterSpec, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a: ParallelLinear
        self.b: ParallelLinear
        if spec.b.split:
            self.a = replicated_linear(sharding, spec.a)
            self.b = ColumnParallelLinear(sharding, spec.b)
        else:
            self.a = RowParallelLinear(sharding, spec.a)
            self.b = replicated_linear(sharding, spec.b)

    def forward(self, x: Tensor, graph_only: bool = False) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.scale, graph_only)
        return y


class AdaptedLinear(nn.Module):
    """A linear layer, whose own weights are frozen, and the adapters that add to its output."""

    def __init__(self, layer: ParallelLinear, specs: Sequence[AdapterSpec], scale: float) -> None:
        super().__init__()
        self.layer = layer
        self.adapters = nn.ModuleList(Adapter(layer.sharding, spec, scale) for spec in specs)
        self.rows = [spec.rows for spec in specs]

    def forward(self, x: Tensor, graph_only: bool = False) -> Tensor:
        """As that of the layer."""
        y = self.layer(x, graph_only)
        added = (adapter(x, graph_only) for adapter in self.adapters)
        return _Added.apply(y, self.rows, graph_only, *added)


class _Added(Function):
    """Adds to rows of `y` in place. No other function may use or save its input."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, rows: Sequence[RowSlice], graph_only: bool, *added: Tensor
    ) -> Tensor:
        ctx.rows = rows
        if not graph_only:
            for own, values in zip(rows, added, strict=True):
                part = _part(y, own)
                part += values.view(part.shape)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # contiguous, as kernels of weight gradients want them
        parts = (_part(grad, own).flatten(-3).contiguous() for own in ctx.rows)
        return grad, None, None, *parts


def _part(y: Tensor, rows: RowSlice) -> Tensor:
    """Some rows of y [s, b, out]: [s, b, groups, parts, width]."""
    return y.unflatten(-1, rows.shape)[..., rows.start : rows.stop, :]
