"""A mixture of experts in a block: experts, and an MLP beside them that takes every token."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.layers.linear import ColumnParallelLinear, replicated_linear
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.parameter import Sharding
from megapipe.layers.recompute import SavePolicy, save_all
from megapipe.model.gpt.mlp import MLP
from megapipe.model.gpt.moe.layers import routing_of
from megapipe.model.gpt.parameters import Named, layer_of
from megapipe.ops.activation import Activate


class MoELayer(nn.Module):
    """[s, b, h] -> [s, b, h]: y = experts(x) + shared(x), if there is a shared MLP.

    With a sigmoid gate that is experts(x) + sigmoid(g x) shared(x), with softmax and c the two
    coefficients softmax(G x) of a token c_0 experts(x) + c_1 shared(x).
    """

    def __init__(self, sharding: Sharding, config: ModelConfig, layer: int, named: Named) -> None:
        super().__init__()
        moe, name = config.moe, f"layers.{layer}.moe"
        self.kind = moe.shared_gate
        self.experts = RoutedExperts(
            sharding,
            layer,
            routing_of(moe, layer),
            Activate(config.activation, sharding.kernels.swiglu),
            named[f"{name}.router.weight"],
            layer_of(named, f"{name}.up"),
            layer_of(named, f"{name}.down"),
        )
        self.of_experts: SavePolicy = save_all
        """How what the experts' backward needs is kept."""
        self.shared: MLP | None = None
        self.gate: ColumnParallelLinear | None = None
        if moe.shared is not None:
            self.shared = MLP(sharding, config, f"{name}.shared", named)
        if self.kind != "none":
            self.gate = replicated_linear(sharding, named[f"{name}.shared_gate.weight"])

    def forward(self, x: Tensor, mb: MicroBatch, graph_only: bool = False) -> Tensor:
        """With `graph_only` the output has no value."""
        graph_only = graph_only and self.gate is None  # whose gradient needs what it multiplies
        y = self.of_experts(self.experts, x, mb, graph_only=graph_only)
        if self.shared is None:
            return y
        z = self.shared(self.shared.up(x), graph_only)
        if self.gate is None:
            return y + z
        gate: Tensor = self.gate(x)
        if self.kind == "sigmoid":
            return y + gate.sigmoid() * z
        of_experts, of_shared = gate.softmax(-1).split(1, dim=-1)
        return of_experts * y + of_shared * z
