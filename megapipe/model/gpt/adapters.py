"""Puts low-rank adapters into the linear layers of a block."""

from __future__ import annotations

from torch import nn

from megapipe.config.model import ModelConfig
from megapipe.layers.lora import AdaptedLinear, AdapterSpec
from megapipe.layers.lora_specs import Lora
from megapipe.model.gpt.lora import adapter_name, adapter_targets, module_of, targets_in
from megapipe.model.gpt.parameters import Named


def adapt(block: nn.Module, layer: int, named: Named, model: ModelConfig, lora: Lora) -> None:
    """Replace the linear layers of `block` that `lora` targets by layers with adapters. `named`:
    specs of the block's parameters by name, adapters included."""
    specs: dict[str, list[AdapterSpec]] = {}
    found = adapter_targets(model)
    for target in targets_in(model, lora, layer):
        name, adapter_target = adapter_name(model, layer, target), found[target]
        a, b = named[f"{name}.lora_a"], named[f"{name}.lora_b"]
        path = module_of(model, layer, adapter_target.layer).replace("moe.", "mixture.")
        specs.setdefault(path, []).append(AdapterSpec(a, b, adapter_target.rows))
    for path, own in specs.items():
        parent, _, attribute = path.rpartition(".")
        module = block.get_submodule(parent)
        setattr(module, attribute, AdaptedLinear(getattr(module, attribute), own, lora.scale))
