"""The units of a transformers class: embedding, layers, and head. Each is a module of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.model.hf.attention import StageAttention, attending
from megapipe.model.hf.calls import LayerCalls, position_ids
from megapipe.model.hf.experts import dispatching
from megapipe.model.hf.outline import Outline
from megapipe.model.hf.stand_ins import ReachedError, suppressed_packing
from megapipe.ops.kernels import Kernels

BASE = "base_layer"
"""Attribute under which a linear layer with an adapter has the layer of the class."""


class Unit(nn.Module):
    """A unit of a class. Its parameters have the class's names, with another beginning."""

    inside: str
    """Path of the class's module in this one."""
    outside: str
    """Path of the same module in the class."""
    kernels: Kernels
    """Kernels of the process; by default torch's."""
    dispatcher: Dispatcher | None = None
    """Dispatcher of the rows of experts; None: this process has all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Kernels()

    def name_in_class(self, path: str) -> str:
        """Return the class's name of what is at `path` in this unit."""
        rest = f"{path}.".replace(f".{BASE}.", ".").removesuffix(".")
        rest = rest.removeprefix(self.inside).removeprefix(".")
        return ".".join(filter(None, (self.outside, rest)))


class EmbeddingUnit(Unit):
    """The class's forward up to its first layer: tokens [b, s] -> hidden state [b, s, h]."""

    inside, outside = "core", ""

    def __init__(self, model: nn.Module, outline: Outline) -> None:
        super().__init__()
        self.core, (first, *_) = outline.around(model, keep=outline.before)
        first.ends = True
        self.stack = outline.stack

    def forward(
        self, tokens: Tensor, mb: MicroBatch | None = None, cache: KVCache | None = None
    ) -> Tensor:
        stand_ins: Any = self.core.get_submodule(self.stack)
        positions = position_ids(mb, tokens)
        given = {} if positions is None else {"position_ids": positions}
        with suppressed_packing():
            try:
                self.core(input_ids=tokens, use_cache=False, **given)
            except ReachedError:
                x: Tensor = stand_ins[0].hidden
                stand_ins[0].hidden = stand_ins[0].call = None
                return x
        raise AssertionError("a forward passed its first layer")


class LayerUnit(Unit):
    """A layer, called as the class calls it: hidden state [b, s, h] -> hidden state."""

    inside = "layer"

    def __init__(self, layer: nn.Module, number: int, outline: Outline, calls: LayerCalls) -> None:
        super().__init__()
        self.layer, self.number = layer, number
        self.outside = f"{outline.stack}.{number}"
        self.calls = calls

    def forward(
        self, x: Tensor, mb: MicroBatch | None = None, cache: KVCache | None = None
    ) -> Tensor:
        args, kwargs = self.calls.of(x, mb)[self.number]
        whole = MicroBatch(0, 0, 0) if mb is None else mb
        attend = StageAttention(self.number, self.kernels, whole, cache)
        with attending(attend), dispatching(self.dispatcher):
            y = self.layer(x, *args, **kwargs)
        return y[0] if isinstance(y, tuple) else y


class HeadUnit(Unit):
    """The class's forward after its last layer: hidden state [b, s, h] -> logits [b, s, V]."""

    inside, outside = "core", ""

    def __init__(self, model: nn.Module, outline: Outline) -> None:
        super().__init__()
        self.core, _ = outline.around(model, keep=outline.after)
        self.stack = outline.stack

    def forward(
        self, x: Tensor, mb: MicroBatch | None = None, cache: KVCache | None = None
    ) -> Tensor:
        stand_ins: Any = self.core.get_submodule(self.stack)
        ids = torch.zeros(*x.shape[:2], dtype=torch.int64, device=x.device)
        stand_ins[-1].given = x
        with suppressed_packing():
            logits: Tensor = self.core(input_ids=ids, use_cache=False).logits
        for each in stand_ins:
            each.given = each.hidden = each.call = None
        return logits


def units_of(model: nn.Module, outline: Outline, calls: LayerCalls) -> list[Unit]:
    """Return the units of a class, which share its tensors."""
    return [
        EmbeddingUnit(model, outline),
        *(
            LayerUnit(each, number, outline, calls)
            for number, each in enumerate(outline.layers(model))
        ),
        HeadUnit(model, outline),
    ]
