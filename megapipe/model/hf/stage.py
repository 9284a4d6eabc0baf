"""A stage of units of a transformers class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.activation_policy import BlockSpan
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.sharding import MoESharding
from megapipe.layers.recompute import recompute, recompute_except_attention, save_all
from megapipe.model.hf.units import LayerUnit, Unit
from megapipe.model.modules.stage import ModuleStage


class ClassStage(ModuleStage):
    """A stage of units, some layers of which are recomputed in the backward, in spans."""

    _spans: Sequence[BlockSpan] = ()

    def set_policies(self, spans: Sequence[BlockSpan]) -> None:
        """Set which layers are recomputed; `spans` cover all layers in order."""
        assert not any(span.policy.offload for span in spans)
        self._spans = spans

    def run(self, y: Any, mb: MicroBatch, cache: KVCache | None = None) -> Any:
        numbers = [*map(int, self.layers)]
        if self.is_first:
            y = self.run_layers(numbers[:1], y, mb, cache)
            if self.frozen and torch.is_grad_enabled():
                y = y.requires_grad_()  # the graph of the adapters begins here
        stop = start = int(self.is_first)
        for span in self._spans:
            start, stop = stop, stop + span.blocks
            again = recompute_except_attention if span.policy.saves_attention else recompute
            policy = again if "block" in span.policy.recompute else save_all
            y = policy(partial(self._segment, numbers[start:stop]), y, mb, cache)
        return self.run_layers(numbers[stop:], y, mb, cache)

    def run_layer(
        self, layer: nn.Module, inputs: tuple[Any, ...], mb: MicroBatch, cache: KVCache | None
    ) -> Any:
        assert isinstance(layer, Unit)
        layer.kernels = self.sharding.kernels
        if isinstance(self.sharding, MoESharding):
            layer.dispatcher = self.sharding.dispatcher
        return layer(*inputs, mb, cache)

    def constants(self) -> list[Tensor]:
        """Return tensors that are kept for all micro-batches: masks, rotary tables."""
        units = [each for each in self.layers.values() if isinstance(each, LayerUnit)]
        return units[0].calls.tensors() if units else []

    def _segment(
        self,
        numbers: Sequence[int],
        x: Tensor,
        mb: MicroBatch,
        cache: KVCache | None,
        *,
        skip_output: bool = False,
    ) -> Tensor:
        y: Tensor = self.run_layers(numbers, x, mb, cache)
        return y
