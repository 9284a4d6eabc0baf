"""The MLP: GELU with two matrices, or SwiGLU or GeGLU with three (Shazeer, 2002.05202)."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.layers.linear import ColumnParallelLinear, RowParallelLinear
from megapipe.layers.parameter import Sharding
from megapipe.model.gpt.parameters import Named, layer_of
from megapipe.ops.activation import Activate


class MLP(nn.Module):
    """An MLP in two steps: `up` widens [s(/tp), b, h], a call does the rest.

    The inner width is split over tp. With a gate `up` is one weight [2, f, h], gate first, split
    along f. `name` is that of its parameters.
    """

    def __init__(
        self, sharding: Sharding, config: ModelConfig, name: str, parameters: Named
    ) -> None:
        super().__init__()
        self.activate = Activate(config.activation, sharding.kernels.swiglu)
        """The output of `up` -> the input of `down`, [s, b, f/tp]."""
        self.up = ColumnParallelLinear(sharding, *layer_of(parameters, f"{name}.up"))
        self.down = RowParallelLinear(sharding, *layer_of(parameters, f"{name}.down"))

    def forward(self, y: Tensor, graph_only: bool = False) -> Tensor:
        """The output of `up`, [s, b, f/tp] (with a gate: [s, b, 2 f/tp]), -> [s(/tp), b, h].

        With `graph_only` the output has no value.
        """
        return self.down(self.activate(y), graph_only)
