"""Linear layers for user-defined models.

Each layer is an ``nn.Linear`` until it is bound to a stage, so a model of such layers runs in plain
torch. A bound layer defers its weight gradient to ``W`` (:mod:`megapipe.layers.weight_grad`), and
column and row layers are split over tensor parallelism (Shoeybi et al., 1909.08053).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import InitialValues, ParameterSpec


class Linear(nn.Linear):
    """``nn.Linear`` with a weight gradient deferred to ``W``: [..., in] -> [..., out].

    Every tensor-parallel rank holds the whole layer. The input has two dimensions or more.
    """

    split_dim: ClassVar[int | None] = None
    """Dimension of the weight [out, in] that is split over tp; None: the weight is not split."""
    parallel: ClassVar[type[ParallelLinear]] = ColumnParallelLinear

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.bound: ParallelLinear | None = None

    def bind(self, sharding: Sharding, weight: ParameterSpec, bias: ParameterSpec | None) -> None:
        """Bind the layer to a stage, with new parameters that have no storage yet."""
        if self.split_dim is None:
            sharding = sharding.unsplit()
        del self.weight, self.bias
        self.bound = self.parallel(sharding, weight, bias)

    def spec(self, name: str, attribute: str) -> ParameterSpec:
        """Return the spec of the weight or the bias (`attribute`), with its current values."""
        parameter = self._parameters[attribute]
        assert parameter is not None
        is_weight = attribute == "weight"
        return ParameterSpec(
            name=f"{name}.{attribute}",
            shape=tuple(parameter.shape),
            role="matrix" if is_weight else "vector",
            split_dim=self.split_dim if is_weight or self.split_dim == 0 else None,
            decay=is_weight,
            initial=InitialValues(parameter.detach()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.bound is None else self.bound(x)

    def __getattr__(self, name: str) -> Any:
        """Find a bound layer's weight and bias too, for code that reads their type or device."""
        bound = self.__dict__.get("_modules", {}).get("bound")
        if bound is not None and name in ("weight", "bias"):
            return getattr(bound, name)
        return super().__getattr__(name)


class ColumnLinear(Linear):
    """Linear layer with outputs split over tp: [..., in] -> [..., out/tp]; a RowLinear follows it.

    Modules between the two layers must accept any width, like elementwise functions, or attention
    that derives the number of heads from the width.
    """

    split_dim = 0


class RowLinear(Linear):
    """Linear layer with inputs split over tp, and outputs summed: [..., in/tp] -> [..., out]."""

    split_dim = 1
    parallel = RowParallelLinear


def user_parameter(
    parameter: Parameter,
    name: str,
    *,
    is_embedding: bool = False,
    use: int | None = None,
    heads_partial: bool = False,
) -> ParameterSpec:
    """Return the spec of a plain parameter, with the current values.

    Autograd computes its gradient, within ``I``. Weight decay applies to two dimensions or more.
    `use`: 0 for a tied parameter in the model's first layer, 1 in the last; None: not tied.
    `heads_partial`: whether each tp rank computes a part of the gradient, from its own heads.
    """
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        role="embedding" if is_embedding else "matrix" if parameter.dim() == 2 else "vector",
        decay=parameter.dim() >= 2,
        grad_by_autograd=True,
        tied=use is not None,
        use=use or 0,
        heads_partial=heads_partial,
        initial=InitialValues(parameter.detach()),
    )
