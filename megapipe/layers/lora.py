"""Linear layers with low-rank adapters (LoRA; Hu et al., 2106.09685).

An adapter is two of megapipe's linear layers, one after the other, which handle tensor and sequence
parallelism, recomputation and deferred weight gradients. On a column-parallel layer, every tp rank
holds the first matrix A and applies A to local positions, and B is column-parallel. On a
row-parallel layer, A is row-parallel, and every tp rank holds B. So over tp an adapter communicates
`rank` values per token instead of the hidden size.
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
    """Matrices A and B of an adapter, and the rows of the adapted matrix that B A adds to."""

    a: ParameterSpec
    b: ParameterSpec
    rows: RowSlice


class Adapter(nn.Module):
    """Computes scale (x A^T) B^T, split like the adapted layer; `skip_output` skips B's product."""

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

    def forward(self, x: Tensor, skip_output: bool = False) -> Tensor:
        y: Tensor = self.b(self.a(x) * self.scale, skip_output)
        return y


class AdaptedLinear(nn.Module):
    """A frozen linear layer, and the adapters that add to its output."""

    def __init__(self, layer: ParallelLinear, specs: Sequence[AdapterSpec], scale: float) -> None:
        super().__init__()
        self.layer = layer
        self.adapters = nn.ModuleList(Adapter(layer.sharding, spec, scale) for spec in specs)
        self.rows = [spec.rows for spec in specs]

    def forward(self, x: Tensor, skip_output: bool = False) -> Tensor:
        """Return the frozen layer's output plus the adapters' outputs."""
        y = self.layer(x, skip_output)
        added = (adapter(x, skip_output) for adapter in self.adapters)
        return _Added.apply(y, self.rows, skip_output, *added)


class _Added(Function):
    """Adds the adapters' outputs to `y` in place; no other function may use or save `y`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, rows: Sequence[RowSlice], skip_output: bool, *added: Tensor
    ) -> Tensor:
        ctx.rows = rows
        if not skip_output:
            for own, values in zip(rows, added, strict=True):
                part = _part(y, own)
                part += values.view(part.shape)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # contiguous: weight-gradient kernels need it
        parts = (_part(grad, own).flatten(-3).contiguous() for own in ctx.rows)
        return grad, None, None, *parts


def _part(y: Tensor, rows: RowSlice) -> Tensor:
    """Return a view of the outputs `rows` of y [s, b, out]: [s, b, groups, parts, width]."""
    return y.unflatten(-1, rows.shape)[..., rows.start : rows.stop, :]
