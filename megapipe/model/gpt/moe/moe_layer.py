"""The MoE layer of a block: routed experts, and a shared expert that takes every token."""

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
    """MoE layer, [s, b, h] -> [s, b, h]: y = experts(x) + shared(x), if there is a shared expert.

    With a sigmoid gate y = experts(x) + sigmoid(g x) shared(x). With a softmax gate c = softmax(G
    x), two numbers per token, y = c_0 experts(x) + c_1 shared(x).
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
        """Policy of the routed experts: how tensors for the backward are saved or recomputed."""
        self.shared: MLP | None = None
        self.gate: ColumnParallelLinear | None = None
        if moe.shared_ffn_hidden is not None:
            self.shared = MLP(sharding, config, f"{name}.shared", named)
        if self.kind != "none":
            self.gate = replicated_linear(sharding, named[f"{name}.shared_gate.weight"])

    def forward(self, x: Tensor, mb: MicroBatch, skip_output: bool = False) -> Tensor:
        """Run the layer; with `skip_output` the output has no value."""
        skip_output = skip_output and self.gate is None  # the gate's gradient needs both outputs
        y = self.of_experts(self.experts, x, mb, skip_output=skip_output)
        if self.shared is None:
            return y
        z = self.shared(self.shared.up(x), skip_output)
        if self.gate is None:
            return y + z
        gate: Tensor = self.gate(x)
        if self.kind == "sigmoid":
            return y + gate.sigmoid() * z
        of_experts, of_shared = gate.softmax(-1).split(1, dim=-1)
        return of_experts * y + of_shared * z
