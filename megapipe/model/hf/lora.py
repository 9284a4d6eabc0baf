"""Low-rank adapters on linear layers of a transformers class (LoRA; Hu et al., 2106.09685)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megapipe.layers.lora_specs import Lora
from megapipe.layers.user_linear import ColumnLinear, Linear, RowLinear
from megapipe.model.hf.units import BASE, LayerUnit, Unit

ALL = "all"
FACTORS: Mapping[type[Linear], tuple[type[Linear], type[Linear]]] = {
    Linear: (Linear, Linear),
    ColumnLinear: (Linear, ColumnLinear),
    RowLinear: (RowLinear, Linear),
}
"""Kinds of the layers A and B of an adapter, by the kind of the layer that it adds to."""


class AdaptedLinear(nn.Module):
    """A linear layer and its adapter: [..., in] -> [..., out]. The layer's attributes are found
    here too."""

    def __init__(self, layer: Linear, lora: Lora) -> None:
        super().__init__()
        inner, outer = FACTORS[type(layer)]
        self.base_layer = layer
        self.lora_a = inner(layer.in_features, lora.rank, bias=False)
        self.lora_b = outer(lora.rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x) * self.scale)
        return y

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(BASE), name)


def factor_names(weight: str) -> tuple[str, str]:
    """Return the names of the matrices A and B that add to the parameter `weight`."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_a.weight", f"{layer}.lora_b.weight"


def is_adapter(name: str) -> bool:
    """Whether a parameter with this name is part of an adapter."""
    return name.endswith(factor_names(""))


def adapt_units(units: Iterable[nn.Module], lora: Lora) -> None:
    """Put an adapter on each linear layer that `lora` targets, in layers of the class."""
    for unit in units:
        for path in [*_linears(unit)]:
            if _is_target(path, lora.targets):
                parent, _, attribute = path.rpartition(".")
                module: Any = unit.get_submodule(parent)
                setattr(module, attribute, AdaptedLinear(getattr(module, attribute), lora))


def unknown_targets(units: Iterable[Unit], targets: Sequence[str]) -> str | None:
    """Say which target names no linear layer of the class; None if all do."""
    paths = [path for unit in units for path in _linears(unit)]
    wrong = [each for each in targets if not any(_is_target(path, [each]) for path in paths)]
    if not targets:
        return "it leaves nothing to train: expected all, or some linear layers"
    if not paths:
        return "its layers have no nn.Linear"
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    if not wrong:
        return None
    return f"no layer has a linear layer {wrong[0]}: expected {ALL}, or some of {', '.join(names)}"


def _linears(unit: nn.Module) -> Iterable[str]:
    """Yield the paths of a unit's linear layers; embedding and head have none."""
    if isinstance(unit, LayerUnit):
        yield from (path for path, each in unit.named_modules() if isinstance(each, Linear))


def _is_target(path: str, targets: Sequence[str]) -> bool:
    return any(each == ALL or f".{path}".endswith(f".{each}") for each in targets)
