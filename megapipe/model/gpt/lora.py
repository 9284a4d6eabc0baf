"""The linear layers of a GPT that can have low-rank adapters, and the adapters' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.layers.lora_specs import ALL_ROWS, Lora, RowSlice, adapter
from megapipe.layers.specs import ParameterSpec
from megapipe.model.gpt.hf.config import row_of
from megapipe.model.gpt.parameters import block_parameters, known

ALL = "all"
QKV = "attention.qkv"
HEADS = ("attention.q", "attention.k", "attention.v")
MLP = "mlp."
COLUMNS = (QKV, "mlp.up")
"""Linear layers whose weight rows are split over tp; other layers split their columns."""


class AdapterTarget(NamedTuple):
    """Weight rows of a linear layer with an adapter. In MoE layers "mlp" is the shared expert."""

    layer: str
    rows: RowSlice = ALL_ROWS


def adapter_targets(model: ModelConfig) -> dict[str, AdapterTarget]:
    """Return the possible targets in a block by name, in the order of the forward.

    An adapter of queries only (or of keys, values or the gate) adds only to those output rows of
    the joint layer. It is equivalent to peft's adapter of a separate query layer.
    """
    queries = model.heads // known(model.kv_heads)
    groups = (-1, queries + 2, known(model.head_dim))
    cuts = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))
    found = {QKV: AdapterTarget(QKV)}
    found |= {
        name: AdapterTarget(QKV, RowSlice(groups, *cut))
        for name, cut in zip(HEADS, cuts, strict=True)
    }
    found["attention.out"] = AdapterTarget("attention.out")
    if not any(_has_mlp(model, layer) for layer in range(model.layers)):
        return found
    if model.gated:
        found["mlp.gate"] = AdapterTarget("mlp.up", RowSlice((1, 2, -1), 0, 1))
        found["mlp.up"] = AdapterTarget("mlp.up", RowSlice((1, 2, -1), 1, 2))
    else:
        found["mlp.up"] = AdapterTarget("mlp.up")
    return found | {"mlp.down": AdapterTarget("mlp.down")}


def _has_mlp(model: ModelConfig, layer: int) -> bool:
    return model.moe.shared_ffn_hidden is not None or not model.moe.has_experts(layer)


def targets_in(model: ModelConfig, lora: Lora, layer: int) -> list[str]:
    """Return the targets in one layer; an MoE layer without a shared expert has none in its MLP."""
    found = adapter_targets(model)
    return [
        target
        for target in lora.targets
        if _has_mlp(model, layer) or not found[target].layer.startswith(MLP)
    ]


def module_of(model: ModelConfig, layer: int, name: str) -> str:
    """Return the path of module `name` in a layer. MoE layers have moe.shared in place of mlp."""
    if model.moe.has_experts(layer) and name.startswith(MLP):
        return f"moe.shared.{name.removeprefix(MLP)}"
    return name


def resolved_targets(model: ModelConfig, targets: Sequence[str]) -> list[str]:
    """Return the targets in the order of the forward, with `all` replaced by names.

    Raises :class:`ConfigError` for a target that a block does not have.
    """
    found = adapter_targets(model)
    wanted = set(targets) - {ALL}
    if wrong := sorted(wanted - found.keys()):
        raise ConfigError(
            f"lora.targets={list(targets)}: a block has no linear layer {wrong[0]}: expected "
            f"{ALL}, or some of {', '.join(found)}"
        )
    if not targets:
        raise ConfigError(
            f"lora.targets=[] leaves nothing to train: expected {ALL}, or some layers"
        )
    both = [name for name in HEADS if name in wanted]
    if QKV in wanted and both:
        raise ConfigError(
            f"lora.targets={list(targets)}: {QKV} already includes queries, keys and values: "
            f"expected {QKV} or {both[0]}, not both"
        )
    if ALL in targets:
        apart = bool(both) or (QKV not in wanted and _has_heads_apart(model))
        wanted |= found.keys() - ({QKV} if apart else set(HEADS))
    return [name for name in found if name in wanted]


def _has_heads_apart(model: ModelConfig) -> bool:
    """Whether queries, keys and values have separate matrices in the model's Hugging Face class;
    True without a class."""
    try:
        row = row_of(model.model_copy(update={"vocab_size": model.vocab_size or 1}))
    except ConfigError:
        return True
    return len(row.layer[QKV].names) > 1


def adapter_name(model: ModelConfig, layer: int, target: str) -> str:
    """Return the prefix of the parameter names of an adapter."""
    return f"layers.{layer}.{module_of(model, layer, target)}"


def with_adapters(
    model: ModelConfig, parameters: Iterable[ParameterSpec], lora: Lora | None
) -> Iterator[ParameterSpec]:
    """Yield `parameters`; with `lora` they are frozen, and each target's adapter follows."""
    if lora is None:
        yield from parameters
        return
    found = adapter_targets(model)
    for spec in parameters:
        yield replace(spec, frozen=True)
        start, _, rest = spec.name.partition(".")
        number, _, module = rest.partition(".")
        if start != "layers" or not module.endswith(".weight"):
            continue
        for target in targets_in(model, lora, int(number)):
            layer, rows = found[target]
            if module == f"{module_of(model, int(number), layer)}.weight":
                yield from adapter(
                    adapter_name(model, int(number), target),
                    lora.rank,
                    spec.shape[-1],
                    rows.count(prod(spec.shape[:-1])),
                    column=layer in COLUMNS,
                )


def adapter_flops(model: ModelConfig, lora: Lora | None, layer: int) -> int:
    """Return the forward FLOPs per token of a layer's adapters. I and W each take as many FLOPs."""
    if lora is None:
        return 0
    specs = with_adapters(model, block_parameters(model, layer), lora)
    return sum(2 * prod(spec.shape) for spec in specs if not spec.frozen)
