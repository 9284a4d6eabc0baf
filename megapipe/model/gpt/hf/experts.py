"""Field mappings for Hugging Face classes with experts.

The mappings cover the FFN hidden size of dense layers and the section `model.moe`, without fields
that only training uses (:data:`TRAINING`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.field_mappings import FieldMapping, Misfit
from megapipe.model.gpt.moe.checks import check_experts

TRAINING = (
    *("router_init_scale", "jitter", "second_expert"),
    *("aux_loss_coeff", "aux_loss_scope", "aux_loss_choices", "z_loss_coeff"),
)
"""Fields that have no effect on the output of a trained model."""


def _experts(
    fields: Mapping[str, str], width: str, fixed: Mapping[str, Any], *parts: FieldMapping
) -> FieldMapping:
    """Make the field mapping of a class with experts.

    Args:
        fields: fields of `model.moe`, each with the key of the class's config that has its value.
        width: the key for the FFN hidden size of dense layers.
        fixed: fields of `model.moe` with the value that they have in all models of the class.
        parts: mappings of further fields of `model.moe`. All other fields must have their defaults.
    """

    def read(config: Any) -> dict[str, Any]:
        found = {ours: getattr(config, theirs) for ours, theirs in fields.items()}
        sizes = {"layers": config.num_hidden_layers, "ffn_hidden": getattr(config, width)}
        try:
            for part in parts:
                found |= part.read(config)
            moe = MoEConfig.model_validate({**fixed, **found})
            if moe.num_experts is None:
                raise ConfigError("it has no experts")
            model = ModelConfig.model_validate({**sizes, "moe": moe})
            check_experts(model.resolved(vocab_size=None, sequence_length=0))
        except (ValidationError, ConfigError) as error:
            raise ConfigError(
                f"{_key_values(config, fields)} cannot be expressed: {_why(error)}"
            ) from error
        return {"moe": moe, "ffn_hidden": model.ffn_hidden}

    def write(model: ModelConfig) -> dict[str, Any]:
        keys = {width: model.ffn_hidden}
        keys |= {theirs: getattr(model.moe, ours) for ours, theirs in fields.items()}
        for part in parts:
            keys |= part.write(model)
        return keys

    def misfits(model: ModelConfig) -> Iterator[Misfit]:
        if model.moe.num_experts is None:
            yield Misfit("moe.num_experts", None, "a number")
            return
        if isinstance(model.moe.num_experts, list):
            yield Misfit("moe.num_experts", model.moe.num_experts, "one number for all layers")
        for part in parts:
            yield from part.misfits(model)
        free = {name for part in parts for name in part.fields}.union(fields, TRAINING)
        for name, info in MoEConfig.model_fields.items():
            wanted = fixed.get(name, info.get_default(call_default_factory=True))
            if name not in free and getattr(model.moe, name) != wanted:
                yield Misfit(f"moe.{name}", getattr(model.moe, name), str(wanted))

    return FieldMapping(("moe", "ffn_hidden"), read, write, misfits)


def _key_values(config: Any, fields: Mapping[str, str]) -> str:
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
    return {"layer_freq": every, "first_dense_layers": first, "dense_layers": dense[first:]}


def _write_listed(model: ModelConfig) -> dict[str, Any]:
    every = 1 if model.moe.first_dense_layers % model.moe.layer_freq else model.moe.layer_freq
    candidates = range(every - 1, model.layers, every)
    dense = [layer for layer in candidates if not model.moe.has_experts(layer)]
    return {"decoder_sparse_step": every, "mlp_only_layers": dense}


_LISTED = FieldMapping(
    ("first_dense_layers", "layer_freq", "dense_layers"), _read_listed, _write_listed
)
"""Field mapping for classes with experts in every `layer_freq`-th layer, except listed layers."""

_DENSE_FIRST = FieldMapping(
    ("first_dense_layers",),
    lambda config: {"first_dense_layers": config.first_k_dense_replace},
    lambda model: {"first_k_dense_replace": model.moe.first_dense_layers},
)


def _read_shared(config: Any) -> dict[str, Any]:
    if not config.n_shared_experts:
        raise ConfigError(f"n_shared_experts = {config.n_shared_experts}: expected 1 or more")
    return {"shared_ffn_hidden": config.n_shared_experts * config.moe_intermediate_size}


def _shared_and_ffn(model: ModelConfig) -> tuple[int, int]:
    return model.moe.shared_ffn_hidden or 0, model.moe.expert_ffn_hidden or 1


def _write_shared(model: ModelConfig) -> dict[str, Any]:
    shared, ffn = _shared_and_ffn(model)
    return {"n_shared_experts": shared // ffn}


def _no_multiple(model: ModelConfig) -> Iterator[Misfit]:
    shared, ffn = _shared_and_ffn(model)
    if not shared or shared % ffn:
        yield Misfit(
            "moe.shared_ffn_hidden",
            model.moe.shared_ffn_hidden,
            f"a multiple of model.moe.expert_ffn_hidden, {ffn}",
        )


_SHARED = FieldMapping(("shared_ffn_hidden",), _read_shared, _write_shared, _no_multiple)
"""Field mapping for classes whose shared expert is a whole number of routed experts wide."""


def _not_biased(model: ModelConfig) -> Iterator[Misfit]:
    if model.moe.bias_update_rate is None:
        yield Misfit("moe.bias_update_rate", None, "a number, which may be 0")


_BIASED = FieldMapping(
    ("bias_update_rate",), lambda config: {"bias_update_rate": 0.0}, lambda model: {}, _not_biased
)
"""Field mapping for classes with router biases. Their configs have no rate for updating them."""


def _too_small_groups(model: ModelConfig) -> Iterator[Misfit]:
    experts, groups = model.moe.num_experts, model.moe.num_groups
    if isinstance(experts, int) and experts < 2 * groups:
        yield Misfit("moe.num_experts", experts, f"twice as many as model.moe.num_groups={groups}")


_GROUPS_OF_TWO = FieldMapping((), lambda config: {}, lambda model: {}, _too_small_groups)
"""Check for classes that choose a group by its two best experts: a group must have two."""

_ONE_GROUP = {"num_groups": 1, "topk_groups": 1}

MIXTRAL_EXPERTS = _experts(
    {
        "num_experts": "num_local_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn_hidden": "intermediate_size",
        "aux_loss_coeff": "router_aux_loss_coef",
    },
    "intermediate_size",
    _ONE_GROUP,
)

_QWEN3_EXPERTS = _experts(
    {
        "num_experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn_hidden": "moe_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "aux_loss_coeff": "router_aux_loss_coef",
    },
    "intermediate_size",
    _ONE_GROUP,
    _LISTED,
)

QWEN3_EXPERTS = _QWEN3_EXPERTS._replace(
    write_old=lambda model: {"num_experts": model.moe.num_experts}
)

DOTS1_EXPERTS = _experts(
    {
        "num_experts": "n_routed_experts",
        "top_k": "num_experts_per_tok",
        "expert_ffn_hidden": "moe_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "routed_scaling_factor": "routed_scaling_factor",
        "num_groups": "n_group",
        "topk_groups": "topk_group",
    },
    "intermediate_size",
    {"score_function": "sigmoid", "aux_loss_coeff": 0.0},  # its loss has no such term
    _DENSE_FIRST,
    _SHARED,
    _BIASED,
    _GROUPS_OF_TWO,
)
