"""The MLP: GELU with two matrices, or SwiGLU or GeGLU with three (Shazeer, 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.layers.parameter import Sharding
from megapipe.model.gpt.parameters import Named, layer_of
from megapipe.ops.activation import Activate


class MLP(nn.Module):
    """An MLP in two steps: the linear layer `up`, then :meth:`forward` of its output.

    The FFN hidden size f is split over tp. With a gate the weight of `up` is [2, f, h], gate first,
    split along f. `name`: prefix of the parameters' names.
    """

    def __init__(
        self, sharding: Sharding, config: ModelConfig, name: str, parameters: Named
    ) -> None:
        super().__init__()
        self.activate = Activate(config.activation, sharding.kernels.swiglu)
        """Activation function, from the output of `up` to the input of `down`, [s, b, f/tp]."""
        self.up = ColumnParallelLinear(sharding, *layer_of(parameters, f"{name}.up"))
        self.down = RowParallelLinear(sharding, *layer_of(parameters, f"{name}.down"))

    def forward(self, y: Tensor, skip_output: bool = False) -> Tensor:
        """Map the output of `up`, [s, b, f/tp] ([s, b, 2 f/tp] with a gate), to [s(/tp), b, h].

        With `skip_output` the output has no value.
        """
        return self.down(self.activate(y), skip_output)
