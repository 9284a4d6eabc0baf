"""Transformer layers: attention and MLP, each after a norm, each added to the residual."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.layers.activation_policy import BlockPolicy, BlockSpan
from megapipe.layers.dropout import dropout
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.lora_specs import Lora
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.norm import Norm
from megapipe.layers.offload import ActivationOffload, save_policy
from megapipe.layers.parameter import Sharding
from megapipe.layers.recompute import SavePolicy, Segment, save_all
from megapipe.layers.specs import by_name
from megapipe.model.gpt.adapters import adapt
from megapipe.model.gpt.attention import Attention
from megapipe.model.gpt.lora import with_adapters
from megapipe.model.gpt.mlp import MLP
from megapipe.model.gpt.moe.moe_layer import MoELayer
from megapipe.model.gpt.parameters import Named, block_parameters, layer_of
from megapipe.model.gpt.rotary import Rotaries, Tables
from megapipe.model.user_norm import load_norm

Rotary = Tables | None

RunBlock = Callable[["Block", Tensor, MicroBatch, Rotary, bool], Tensor]
"""Function (block, x, micro-batch, rotary, skip_output) -> y, for whole sequences (no slices)."""


class Block(nn.Module):
    """A transformer layer: [s(/tp), b, h] -> [s(/tp), b, h], without values if `skip_output`.

    It consists of four segments, each with a linear layer at its end: norm and qkv, attention and
    output projection, norm and up, activation and down. The block's policy says which segments are
    recomputed or offloaded. Norms after a branch belong to no segment. In an MoE layer the routed
    experts are one segment.
    """

    mlp: MLP
    """The MLP; missing in an MoE layer."""

    def __init__(
        self,
        sharding: Sharding,
        config: ModelConfig,
        layer: int,
        compiled: RunBlock | None = None,
        lora: Lora | None = None,
    ) -> None:
        super().__init__()
        self.sharding = sharding
        self.layer = layer
        self.compiled = compiled
        self.dropout = config.dropout
        self.parallel = config.parallel_residual
        self.is_local = config.window_of(layer) is not None
        named = by_name(with_adapters(config, block_parameters(config, layer), lora))
        name = f"layers.{layer}"
        self.attention_norm = new_norm(sharding, config, named, f"{name}.attention_norm")
        self.attention = Attention(sharding, config, layer, named)
        self.mlp_norm = new_norm(sharding, config, named, f"{name}.mlp_norm")
        self.mixture: MoELayer | None = None
        if config.moe.has_experts(layer):
            self.mixture = MoELayer(sharding, config, layer, named)
        else:
            self.mlp = MLP(sharding, config, f"{name}.mlp", named)
        self.attention_post_norm: Norm | None = None
        self.mlp_post_norm: Norm | None = None
        if config.post_norms:
            self.attention_post_norm = new_norm(
                sharding, config, named, f"{name}.attention_post_norm"
            )
            self.mlp_post_norm = new_norm(sharding, config, named, f"{name}.mlp_post_norm")
        if lora is not None:
            adapt(self, layer, named, config, lora)
        self.set_policy(BlockPolicy(), ActivationOffload())

    def set_policy(self, policy: BlockPolicy, host: ActivationOffload) -> None:
        """Recompute and offload segments as `policy` says; `host`: store of offloaded tensors."""
        self.of_norms = save_policy(policy, "norm", host)
        self.of_attention = save_policy(policy, "attention", host)
        self.of_activation = save_policy(policy, "mlp_activation", host)
        if self.mixture is not None:
            self.mixture.of_experts = save_policy(policy, "experts", host)

    def forward(
        self,
        x: Tensor,
        mb: MicroBatch,
        rotary: Rotary,
        cache: KVCache | None = None,
        skip_output: bool = False,
    ) -> Tensor:
        if self.compiled is not None:
            assert cache is None, "a compiled block takes whole sequences"
            return self.compiled(self, x, mb, rotary, skip_output)
        qkv = self.of_norms(self._project, x, rotary)
        y = self.of_attention(self._attend, qkv, mb, rotary, cache)
        y = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        mlp_input = x if self.parallel else y
        if self.mixture is not None:
            return y + self.run_moe(self.mixture, self.mlp_norm(mlp_input), mb, skip_output)
        wide = self.of_norms(self._widen, mlp_input)
        if self.mlp_post_norm is not None:
            return y + self.mlp_post_norm(self.of_activation(self._narrow, wide, mb))
        return y + self.of_activation(self._narrow, wide, mb, skip_output=skip_output)

    def run_moe(self, mixture: MoELayer, x: Tensor, mb: MicroBatch, skip_output: bool) -> Tensor:
        """Return the output of the MoE layer with its norm and dropout; `x`: the layer's input."""
        if self.mlp_post_norm is not None:
            return self.mlp_post_norm(self._drop(mixture(x, mb, False), mb, "mlp_out"))
        return self._drop(mixture(x, mb, skip_output), mb, "mlp_out")

    def tables(self, rotary: Rotaries) -> Rotary:
        """Return this layer's rotary tables. A sliding-window layer uses `rotary.local`, unless
        that is None."""
        return rotary.local if self.is_local and rotary.local is not None else rotary.whole

    def _project(self, x: Tensor, rotary: Rotary, skip_output: bool = False) -> Tensor:
        return self.attention.project(self.attention_norm(x), rotary, skip_output)

    def _attend(
        self,
        qkv: Tensor,
        mb: MicroBatch,
        rotary: Rotary,
        cache: KVCache | None,
        skip_output: bool = False,
    ) -> Tensor:
        y = self.attention(qkv, mb, rotary, cache, skip_output)
        return self._drop(y, mb, "attention_out")

    def _widen(self, x: Tensor, skip_output: bool = False) -> Tensor:
        return self.mlp.up(self.mlp_norm(x), skip_output)

    def _narrow(self, wide: Tensor, mb: MicroBatch, skip_output: bool = False) -> Tensor:
        return self._drop(self.mlp(wide, skip_output), mb, "mlp_out")

    def _drop(self, y: Tensor, mb: MicroBatch, purpose: str) -> Tensor:
        p = self.dropout if self.training else 0.0
        return dropout(y, p, mb, purpose, self.layer, self.sharding)


class Blocks(nn.ModuleList):
    """The blocks of a stage, one after the other: [s(/tp), b, h] -> [s(/tp), b, h]."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        blocks = list(blocks)
        super().__init__(blocks)
        self._host = ActivationOffload()
        self._spans: list[tuple[Segment, SavePolicy]] = [(partial(_through, blocks), save_all)]

    def use(self, spans: Sequence[BlockSpan]) -> None:
        """Set what blocks recompute and offload; `spans` cover all blocks in order."""
        assert sum(span.blocks for span in spans) == len(self)
        self._spans.clear()
        stop = 0
        for span in spans:
            start, stop = stop, stop + span.blocks
            blocks = cast("list[Block]", list(self)[start:stop])
            how = save_policy(span.policy, "block", self._host)
            self._spans.append((partial(_through, blocks), how))
            for block in blocks:
                block.set_policy(span.policy, self._host)

    def forward(
        self, x: Tensor, mb: MicroBatch, rotary: Rotaries, cache: KVCache | None, skip_output: bool
    ) -> Tensor:
        """Run the blocks; with `skip_output` the output has no value."""
        self._host.begin()
        last = len(self._spans) - 1
        for i, (segment, how) in enumerate(self._spans):
            x = how(segment, x, mb, rotary, cache, skip_output=skip_output and i == last)
        return x


def _through(
    blocks: Sequence[Block],
    x: Tensor,
    mb: MicroBatch,
    rotary: Rotaries,
    cache: KVCache | None,
    skip_output: bool = False,
) -> Tensor:
    last = len(blocks) - 1
    for i, block in enumerate(blocks):
        x = block(x, mb, block.tables(rotary), cache, skip_output and i == last)
    return x


def new_norm(sharding: Sharding, config: ModelConfig, parameters: Named, name: str) -> Norm:
    return Norm(
        sharding,
        *layer_of(parameters, name),
        centred=config.norm == "layernorm",
        eps=config.norm_eps,
        offset=config.zero_centered_norm,
        kernel=load_norm(config.norm) if config.own_norm else None,
    )
