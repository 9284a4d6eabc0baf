"""One transformer layer: attention and MLP, each behind a norm, each added to the residual."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.model.attention import Attention
from megapipe.model.carry import Carry
from megapipe.model.config import ModelConfig
from megapipe.model.dropout import dropout
from megapipe.model.microbatch import MicroBatch
from megapipe.model.mlp import MLP
from megapipe.model.norm import Norm
from megapipe.tensor_parallel.parameter import Sharding


class Block(nn.Module):
    """[s(/tp), b, h] -> [s(/tp), b, h]; with `graph_only` the output has no value."""

    def __init__(self, sharding: Sharding, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.sharding = sharding
        self.layer = layer
        self.dropout = config.dropout
        self.attention_norm = new_norm(sharding, config, f"layers.{layer}.attention_norm")
        self.attention = Attention(sharding, config, layer)
        self.mlp_norm = new_norm(sharding, config, f"layers.{layer}.mlp_norm")
        self.mlp = MLP(sharding, config, layer)

    def forward(
        self,
        x: Tensor,
        mb: MicroBatch,
        rotary: tuple[Tensor, Tensor] | None,
        carry: Carry | None = None,
        graph_only: bool = False,
    ) -> Tensor:
        p = self.dropout if self.training else 0.0
        y = self.attention(self.attention_norm(x), mb, rotary, carry)
        x = x + dropout(y, p, mb, "attention_out", self.layer, self.sharding)
        y = self.mlp(self.mlp_norm(x), graph_only)
        return x + dropout(y, p, mb, "mlp_out", self.layer, self.sharding)


def new_norm(sharding: Sharding, config: ModelConfig, name: str) -> Norm:
    return Norm(
        sharding, name, config.hidden, kind=config.norm, bias=config.bias, eps=config.norm_eps
    )
