"""LayerNorm and RMSNorm over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.layers.parameter import Sharding, new_parameter
from megapipe.layers.specs import ParameterSpec
from megapipe.ops.norm import NormKernel


class Norm(nn.Module):
    """LayerNorm (`centred`) or RMSNorm of [s(/tp), b, h] -> the same shape; every tp rank holds the
    weights.

    With `offset` the weight is zero-centred: stored as a difference from 1. The weight gradient is
    computed within ``I``: it is a by-product of the input gradient. With sequence parallelism it
    covers local positions only, and is summed over tp once a step.
    """

    def __init__(
        self,
        sharding: Sharding,
        weight: ParameterSpec,
        bias: ParameterSpec | None = None,
        *,
        centred: bool,
        eps: float,
        offset: bool,
        kernel: NormKernel | None = None,
    ) -> None:
        super().__init__()
        self.centred = centred
        self.eps = eps
        self.offset = offset
        self.kernel = kernel or sharding.kernels.norm
        self.weight = new_parameter(sharding, weight)
        self.bias = None if bias is None else new_parameter(sharding, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.bias, self.eps, self.centred, self.offset)
