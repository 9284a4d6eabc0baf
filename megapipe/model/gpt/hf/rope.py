"""The keys of the rotary embedding (`rope_parameters`) as a part of a config map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.parts import FieldMapping, Misfit

_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_KEYS = {
    "linear": {"factor": "rotary_factor"},
    "llama3": {
        "factor": "rotary_factor",
        "original_max_position_embeddings": "rotary_original_positions",
        "low_freq_factor": "rotary_turns_low",
        "high_freq_factor": "rotary_turns_high",
    },
    "yarn": {
        "factor": "rotary_factor",
        "original_max_position_embeddings": "rotary_original_positions",
        "beta_slow": "rotary_turns_low",
        "beta_fast": "rotary_turns_high",
        "attention_factor": "rotary_attention_factor",
    },
}
"""Of each type but the default: its keys, with the fields that have their values."""
_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": None}
_SHARE = "partial_rotary_factor"
_COMMON = {"rope_type", "type", "rope_theta", _SHARE}
_NEUTRAL = {"truncate": True, "mscale": None, "mscale_all_dim": None}
"""Keys that may be there with one value."""


def read_rope(rope: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of the model for one dictionary of rope parameters."""
    kind = rope.get("rope_type", "default")
    if kind not in _TYPES:
        raise ConfigError(
            f"rope_parameters with rope_type {kind!r} are not supported for {model_type}; "
            f"supported are {', '.join(_TYPES)}"
        )
    keys = _KEYS.get(kind, {})
    for key in rope.keys() - keys.keys() - _COMMON:
        if key not in _NEUTRAL or rope[key] != _NEUTRAL[key]:
            raise ConfigError(
                f"rope_parameters with {key} = {rope[key]} are not supported for {model_type} "
                f"(rope_type {kind!r})"
            )
    fields = {"rotary_base": rope["rope_theta"], "rotary_scaling": _TYPES[kind]}
    return fields | {field: _value(rope, key) for key, field in keys.items()}


def _value(rope: dict[str, Any], key: str) -> Any:
    value = rope.get(key)
    return _DEFAULTS.get(key) if value is None else value


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """One dictionary of rope parameters."""
    kind = next(theirs for theirs, ours in _TYPES.items() if ours == model.rotary_scaling)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": model.rotary_base}
    return rope | {key: getattr(model, field) for key, field in _KEYS.get(kind, {}).items()}


def _write_old(model: ModelConfig) -> dict[str, Any]:
    rope = {key: value for key, value in write_rope(model).items() if value is not None}
    base = rope.pop("rope_theta")
    return {"rope_theta": base, "rope_scaling": None if model.rotary_scaling == "none" else rope}


FIELDS = (
    "rotary_base",
    "rotary_scaling",
    *dict.fromkeys(field for keys in _KEYS.values() for field in keys.values()),
)


def _read_partial(config: Any) -> dict[str, Any]:
    share = config.rope_parameters.get(_SHARE, 1.0)
    return {**read_rope(config.rope_parameters, config.model_type), "rotary_share": share}


PARTIAL_ROPE = FieldMapping(
    (*FIELDS, "rotary_share"),
    _read_partial,
    lambda model: {"rope_parameters": {**write_rope(model), _SHARE: model.rotary_share}},
    write_old=lambda model: {
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_share,
        "rope_scaling": _write_old(model)["rope_scaling"],
    },
)
"""Of a class that rotates a share of a head's values. The other classes keep this key and ignore
it."""


def _read_whole(rope: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Fields of a class that rotates all of a head's values."""
    if rope.get(_SHARE, 1.0) != 1:
        raise ConfigError(
            f"rope_parameters with {_SHARE} = {rope[_SHARE]} are not supported for {model_type}: "
            "its class in transformers does not use this key; remove it for what the class computes"
        )
    return read_rope(rope, model_type)


def _read_both(config: Any) -> dict[str, Any]:
    whole, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    fields = _read_whole(local, config.model_type)
    if fields["rotary_scaling"] != "none":
        raise ConfigError(
            f"rope_parameters of sliding_attention with rope_type {local['rope_type']!r} are not "
            f"supported for {config.model_type}; supported is default"
        )
    return {**_read_whole(whole, config.model_type), "rotary_local_base": fields["rotary_base"]}


def _write_both(model: ModelConfig) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": model.rotary_local_base}
    return {"rope_parameters": {"full_attention": write_rope(model), "sliding_attention": local}}


def _without_local_base(model: ModelConfig) -> Iterator[Misfit]:
    if model.rotary_local_base is None:
        yield Misfit("rotary_local_base", None, "a number")


ROPE_BY_WINDOW = FieldMapping(
    (*FIELDS, "rotary_local_base"),
    _read_both,
    _write_both,
    _without_local_base,
    lambda model: {**_write_old(model), "rope_local_base_freq": model.rotary_local_base},
)
"""Of a class that has rope parameters for layers with a window and for those without."""

ROPE = FieldMapping(
    FIELDS,
    lambda config: _read_whole(config.rope_parameters, config.model_type),
    lambda model: {"rope_parameters": write_rope(model)},
    write_old=_write_old,
)
