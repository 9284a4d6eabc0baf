"""Linear layers for the modules of a user's own model.

Each is an ``nn.Linear`` until it is bound to a stage, so a model of them runs and can be tested in
plain torch. Bound, it splits its backward: the weight gradient waits for ``W``
(:mod:`megapipe.layers.weight_grad`). A column and a row layer are then cut over tensor parallelism
(Shoeybi et al., 1909.08053).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.layers.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from megapipe.layers.parameter import Sharding
from megapipe.layers.specs import InitialValues, ParameterSpec


class Linear(nn.Linear):
    """``nn.Linear`` whose weight gradient waits for ``W``: [..., in] -> [..., out].

    Every tensor-parallel rank holds all of it. The input has two dimensions or more.
    """

    split_dim: ClassVar[int | None] = None
    """The dimension of the weight [out, in] that is split over tp."""
    parallel: ClassVar[type[ParallelLinear]] = ColumnParallelLinear

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.bound: ParallelLinear | None = None

    def bind(self, sharding: Sharding, weight: ParameterSpec, bias: ParameterSpec | None) -> None:
        """Become a layer of a stage, with new parameters that have no storage yet."""
        if self.split_dim is None:
            sharding = sharding.unsplit()
        del self.weight, self.bias
        self.bound = self.parallel(sharding, weight, bias)

    def spec(self, name: str, attribute: str) -> ParameterSpec:
        """The spec of its weight or its bias, with the values that it has now."""
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
    """Outputs are split over tp: [..., in] -> [..., out/tp]; a :class:`RowLinear` follows.

    Between the two, a module must accept any width: elementwise functions do, and attention that
    derives its number of heads from the width.
    """

    split_dim = 0


class RowLinear(Linear):
    """Inputs are split over tp, and the outputs summed: [..., in/tp] -> [..., out]."""

    split_dim = 1
    parallel = RowParallelLinear


def user_parameter(
    parameter: Parameter, name: str, *, is_embedding: bool = False, use: int | None = None
) -> ParameterSpec:
    """The spec of a plain parameter, with the values that it has now.

    Autograd computes its gradient, within ``I``. Weight decay applies to two dimensions or more.
    `use` of a tied parameter: 0 in the first unit, 1 in the last; None: it is not tied.
    """
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        role="embedding" if is_embedding else "matrix" if parameter.dim() == 2 else "vector",
        decay=parameter.dim() >= 2,
        grad_by_autograd=True,
        tied=use is not None,
        use=use or 0,
        initial=InitialValues(parameter.detach()),
    )
