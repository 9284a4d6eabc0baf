"""Keys of classes with experts as parts of a config map.

A part has the section `model.moe` but for what only training knows (:data:`TRAINING`), and the
width of dense layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.parts import FieldMapping, Misfit
from megapipe.model.gpt.moe.checks import check_experts

TRAINING = (
    *("router_init_scale", "jitter", "second"),
    *("balance", "balance_scope", "balance_choices", "z"),
)
"""Fields that change no output of a model."""


def _experts(
    fields: Mapping[str, str], width: str, fixed: Mapping[str, Any], *parts: FieldMapping
) -> FieldMapping:
    """A part of a class.

    Args:
        fields: its keys, by our fields of the section, whose values are the same.
        width: the key for the width of dense layers.
        fixed: fields that the class always has so.
        parts: of the section. Fields that are nowhere must have their defaults.
    """

    def read(config: Any) -> dict[str, Any]:
        found = {ours: getattr(config, theirs) for ours, theirs in fields.items()}
        given = {"layers": config.num_hidden_layers, "ffn_hidden": getattr(config, width)}
        try:
            for part in parts:
                found |= part.read(config)
            moe = MoEConfig.model_validate({**fixed, **found})
            if moe.experts is None:
                raise ConfigError("it has no experts")
            model = ModelConfig.model_validate({**given, "moe": moe})
            check_experts(model.resolved(vocab_size=None, sequence_length=0))
        except (ValidationError, ConfigError) as error:
            raise ConfigError(
                f"{_told(config, fields)} cannot be expressed: {_why(error)}"
            ) from error
        return {"moe": moe, "ffn_hidden": model.ffn_hidden}

    def write(model: ModelConfig) -> dict[str, Any]:
        keys = {width: model.ffn_hidden}
        keys |= {theirs: getattr(model.moe, ours) for ours, theirs in fields.items()}
        for part in parts:
            keys |= part.write(model)
        return keys

    def misfits(model: ModelConfig) -> Iterator[Misfit]:
        if model.moe.experts is None:
            yield Misfit("moe.experts", None, "a number")
            return
        if isinstance(model.moe.experts, list):
            yield Misfit("moe.experts", model.moe.experts, "one number for all layers")
        for part in parts:
            yield from part.misfits(model)
        free = {name for part in parts for name in part.fields}.union(fields, TRAINING)
        for name, info in MoEConfig.model_fields.items():
            wanted = fixed.get(name, info.get_default(call_default_factory=True))
            if name not in free and getattr(model.moe, name) != wanted:
                yield Misfit(f"moe.{name}", getattr(model.moe, name), str(wanted))

    return FieldMapping(("moe", "ffn_hidden"), read, write, misfits)


def _told(config: Any, fields: Mapping[str, str]) -> str:
    return ", ".join(f"{key} = {getattr(config, key)}" for key in fields.values())


def _why(error: ValidationError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first = error.errors()[0]
    return f"model.moe.{first['loc'][0]} = {first['input']!r}: {first['msg']}"


def _read_listed(config: Any) -> dict[str, Any]:
    every, layers = config.decoder_sparse_step, config.num_hidden_layers
    if every < 1:
        raise ConfigError(f"decoder_sparse_step = {every}: expected 1 or more")
    dense = sorted({n for n in config.mlp_only_layers if 0 <= n < layers and (n + 1) % every == 0})
    first = next((i for i, layer in enumerate(dense) if layer != i), len(dense))
    return {"every": every, "dense_first": first, "dense_layers": dense[first:]}


def _write_listed(model: ModelConfig) -> dict[str, Any]:
    every = 1 if model.moe.dense_first % model.moe.every else model.moe.every
    candidates = range(every - 1, model.layers, every)
    dense = [layer for layer in candidates if not model.moe.has_experts(layer)]
    return {"decoder_sparse_step": every, "mlp_only_layers": dense}


_LISTED = FieldMapping(("dense_first", "every", "dense_layers"), _read_listed, _write_listed)
"""Experts in every so many-th layer, but for those that are named."""

_DENSE_FIRST = FieldMapping(
    ("dense_first",),
    lambda config: {"dense_first": config.first_k_dense_replace},
    lambda model: {"first_k_dense_replace": model.moe.dense_first},
)


def _read_shared(config: Any) -> dict[str, Any]:
    if not config.n_shared_experts:
        raise ConfigError(f"n_shared_experts = {config.n_shared_experts}: expected 1 or more")
    return {"shared": config.n_shared_experts * config.moe_intermediate_size}


def _shared_and_ffn(model: ModelConfig) -> tuple[int, int]:
    return model.moe.shared or 0, model.moe.ffn or 1


def _write_shared(model: ModelConfig) -> dict[str, Any]:
    shared, ffn = _shared_and_ffn(model)
    return {"n_shared_experts": shared // ffn}


def _no_multiple(model: ModelConfig) -> Iterator[Misfit]:
    shared, ffn = _shared_and_ffn(model)
    if not shared or shared % ffn:
        yield Misfit("moe.shared", model.moe.shared, f"a multiple of model.moe.ffn, {ffn}")


_SHARED = FieldMapping(("shared",), _read_shared, _write_shared, _no_multiple)
"""The MLP beside the experts is as wide as some of them together."""


def _not_biased(model: ModelConfig) -> Iterator[Misfit]:
    if model.moe.bias_rate is None:
        yield Misfit("moe.bias_rate", None, "a number, which may be 0")


_BIASED = FieldMapping(
    ("bias_rate",), lambda config: {"bias_rate": 0.0}, lambda model: {}, _not_biased
)
"""Experts have biases of the choice. How training moves them is no matter of the class."""


def _too_small_groups(model: ModelConfig) -> Iterator[Misfit]:
    experts, groups = model.moe.experts, model.moe.groups
    if isinstance(experts, int) and experts < 2 * groups:
        yield Misfit("moe.experts", experts, f"twice as many as model.moe.groups={groups}")


_GROUPS_OF_TWO = FieldMapping((), lambda config: {}, lambda model: {}, _too_small_groups)
"""A group is chosen by its two best experts."""

_ONE_GROUP = {"groups": 1, "group_top_k": 1}

MIXTRAL_EXPERTS = _experts(
    {
        "experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "intermediate_size",
        "balance": "router_aux_loss_coef",
    },
    "intermediate_size",
    _ONE_GROUP,
)

_QWEN3_EXPERTS = _experts(
    {
        "experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "normalise": "norm_topk_prob",
        "balance": "router_aux_loss_coef",
    },
    "intermediate_size",
    _ONE_GROUP,
    _LISTED,
)

QWEN3_EXPERTS = _QWEN3_EXPERTS._replace(write_old=lambda model: {"num_experts": model.moe.experts})

DOTS1_EXPERTS = _experts(
    {
        "experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "normalise": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "groups": "n_group",
        "group_top_k": "topk_group",
    },
    "intermediate_size",
    {"scores": "sigmoid", "balance": 0.0},  # its loss has no term
    _DENSE_FIRST,
    _SHARED,
    _BIASED,
    _GROUPS_OF_TWO,
)
