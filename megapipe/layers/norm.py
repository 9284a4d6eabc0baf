"""LayerNorm and RMSNorm over the hidden dimension."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.layers.parameter import Sharding, new_parameter


class Norm(nn.Module):
    """[s(/tp), b, h] -> the same shape; every tp rank holds the weights.

    The weight gradient is computed within ``I``: it is a by-product of the input gradient. With
    sequence parallelism it covers this rank's positions only and is summed over tp once a step.
    """

    def __init__(
        self,
        sharding: Sharding,
        name: str,
        hidden: int,
        *,
        kind: Literal["layernorm", "rmsnorm"],
        bias: bool,
        eps: float,
    ) -> None:
        super().__init__()
        self.centred = kind == "layernorm"
        self.eps = eps
        self.kernel = sharding.kernels.norm
        self.weight = new_parameter(
            sharding,
            f"{name}.weight",
            (hidden,),
            fill=1.0,
            sequence_partial=True,
            by_autograd=True,
        )
        self.bias: Parameter | None = None
        if bias and kind == "layernorm":
            self.bias = new_parameter(
                sharding, f"{name}.bias", (hidden,), sequence_partial=True, by_autograd=True
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.kernel(x, self.weight, self.bias, self.eps, self.centred)
