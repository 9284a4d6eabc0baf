"""The keys of the rotary embedding (`rope_parameters`) as a part of a config map."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megapipe.errors import ConfigError
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf.parts import Misfit, Part

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
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
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
    fields["rotary_share"] = rope.get("partial_rotary_factor", 1.0)
    return fields | {field: _value(rope, key) for key, field in keys.items()}


def _value(rope: dict[str, Any], key: str) -> Any:
    value = rope.get(key)
    return _DEFAULTS.get(key) if value is None else value


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """One dictionary of rope parameters."""
    kind = next(theirs for theirs, ours in _TYPES.items() if ours == model.rotary_scaling)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": model.rotary_base}
    if model.rotary_share != 1:
        rope["partial_rotary_factor"] = model.rotary_share
    return rope | {key: getattr(model, field) for key, field in _KEYS.get(kind, {}).items()}


FIELDS = (
    "rotary_base",
    "rotary_share",
    "rotary_scaling",
    *dict.fromkeys(field for keys in _KEYS.values() for field in keys.values()),
)

PARTIAL_ROPE = Part(
    FIELDS,
    lambda config: read_rope(config.rope_parameters, config.model_type),
    lambda model: {
        "rope_parameters": {"partial_rotary_factor": model.rotary_share, **write_rope(model)}
    },
)
"""Of a class whose own default is a share."""


def _read_both(config: Any) -> dict[str, Any]:
    whole, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    fields = read_rope(local, config.model_type)
    if fields["rotary_scaling"] != "none":
        raise ConfigError(
            f"rope_parameters of sliding_attention with rope_type {local['rope_type']!r} are not "
            f"supported for {config.model_type}; supported is default"
        )
    return {**read_rope(whole, config.model_type), "rotary_local_base": fields["rotary_base"]}


def _write_both(model: ModelConfig) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": model.rotary_local_base}
    return {"rope_parameters": {"full_attention": write_rope(model), "sliding_attention": local}}


def _without_local_base(model: ModelConfig) -> Iterator[Misfit]:
    if model.rotary_local_base is None:
        yield Misfit("rotary_local_base", None, "a number")


ROPE_BY_WINDOW = Part((*FIELDS, "rotary_local_base"), _read_both, _write_both, _without_local_base)
"""Of a class that has rope parameters for layers with a window and for those without."""

ROPE = Part(
    FIELDS,
    lambda config: read_rope(config.rope_parameters, config.model_type),
    lambda model: {"rope_parameters": write_rope(model)},
)
