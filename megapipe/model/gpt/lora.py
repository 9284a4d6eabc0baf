"""Linear layers of a GPT that can have low-rank adapters, and the parameters of these. No torch."""

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
"""Layers whose rows are split over tp; the columns of the others are."""


class AdapterTarget(NamedTuple):
    """Where an adapter is: rows of a linear layer. In layers with experts the MLP is the shared
    one."""

    layer: str
    rows: RowSlice = ALL_ROWS


def adapter_targets(model: ModelConfig) -> dict[str, AdapterTarget]:
    """The targets in the blocks of a resolved model, in the order of the forward.

    An adapter of the queries alone (keys, values, the gate) adds to their rows of the layer that
    computes all of them, so that it is what peft puts beside a layer of its own for them.
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
    return model.moe.shared is not None or not model.moe.has_experts(layer)


def targets_in(model: ModelConfig, lora: Lora, layer: int) -> list[str]:
    """Those of a layer, which may have experts and no MLP beside them."""
    found = adapter_targets(model)
    return [
        target
        for target in lora.targets
        if _has_mlp(model, layer) or not found[target].layer.startswith(MLP)
    ]


def module_of(model: ModelConfig, layer: int, name: str) -> str:
    """A module of a layer, by its name in layers without experts."""
    if model.moe.has_experts(layer) and name.startswith(MLP):
        return f"moe.shared.{name.removeprefix(MLP)}"
    return name


def resolved_targets(model: ModelConfig, targets: Sequence[str]) -> list[str]:
    """The targets in the order of the forward, with those that `all` stands for.

    Raises :class:`ConfigError` for one that a block does not have.
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
            f"lora.targets={list(targets)}: {QKV} is queries, keys and values together: expected "
            f"that or {both[0]}, not both"
        )
    if ALL in targets:
        apart = bool(both) or (QKV not in wanted and _has_heads_apart(model))
        wanted |= found.keys() - ({QKV} if apart else set(HEADS))
    return [name for name in found if name in wanted]


def _has_heads_apart(model: ModelConfig) -> bool:
    """Whether the model's class of Hugging Face's, if it has one, has queries, keys and values in
    matrices of their own."""
    try:
        row = row_of(model.model_copy(update={"vocab_size": model.vocab_size or 1}))
    except ConfigError:
        return True
    return len(row.layer[QKV].names) > 1


def adapter_name(model: ModelConfig, layer: int, target: str) -> str:
    """The beginning of the names of an adapter's matrices."""
    return f"layers.{layer}.{module_of(model, layer, target)}"


def with_adapters(
    model: ModelConfig, parameters: Iterable[ParameterSpec], lora: Lora | None
) -> Iterator[ParameterSpec]:
    """`parameters` and, with `lora`, the adapters beside them; then nothing else is trained."""
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
    """FLOPs per token of the forward of a layer's adapters; I takes as many, and so does W."""
    if lora is None:
        return 0
    specs = with_adapters(model, block_parameters(model, layer), lora)
    return sum(2 * prod(spec.shape) for spec in specs if not spec.frozen)
