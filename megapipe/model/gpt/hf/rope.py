"""Field mappings for the keys of the rotary embedding (`rope_parameters`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeConfig
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.field_mappings import FieldMapping, Misfit

_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
_KEYS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_slow": "low_freq_factor",
        "beta_fast": "high_freq_factor",
        "attention_factor": "attention_factor",
    },
}
"""For each rope type except the default: its keys, each with the field of `model.rope` that has
the key's value."""
_DEFAULTS = {"beta_slow": 1.0, "beta_fast": 32.0, "attention_factor": None}
_SHARE = "partial_rotary_factor"
_COMMON = {"rope_type", "type", "rope_theta", _SHARE}
_NEUTRAL = {"truncate": True, "mscale": None, "mscale_all_dim": None}
"""Keys that have no effect with this value. With another value they are refused."""


def read_rope(rope: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return fields of the section `model.rope`, read from a dictionary of rope parameters."""
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
    fields = {"base": rope["rope_theta"], "scaling": _TYPES[kind]}
    return fields | {field: _value(rope, key) for key, field in keys.items()}


def _value(rope: dict[str, Any], key: str) -> Any:
    value = rope.get(key)
    return _DEFAULTS.get(key) if value is None else value


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the rope parameters of a model as a dictionary."""
    kind = next(theirs for theirs, ours in _TYPES.items() if ours == model.rope.scaling)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": model.rope.base}
    return rope | {key: getattr(model.rope, field) for key, field in _KEYS.get(kind, {}).items()}


def _write_old(model: ModelConfig) -> dict[str, Any]:
    rope = {key: value for key, value in write_rope(model).items() if value is not None}
    base = rope.pop("rope_theta")
    return {"rope_theta": base, "rope_scaling": None if model.rope.scaling == "none" else rope}


def _without(*names: str) -> Callable[[ModelConfig], Iterator[Misfit]]:
    """Return a misfits function: fields `names` of `model.rope` must have their defaults."""

    def misfits(model: ModelConfig) -> Iterator[Misfit]:
        for name in names:
            default = RopeConfig.model_fields[name].default
            if getattr(model.rope, name) != default:
                yield Misfit(f"rope.{name}", getattr(model.rope, name), str(default))

    return misfits


def _read_partial(config: Any) -> dict[str, Any]:
    percent = config.rope_parameters.get(_SHARE, 1.0)
    fields = read_rope(config.rope_parameters, config.model_type)
    return {"rope": {**fields, "percent": percent}}


PARTIAL_ROPE = FieldMapping(
    ("rope",),
    _read_partial,
    lambda model: {"rope_parameters": {**write_rope(model), _SHARE: model.rope.percent}},
    _without("local_base"),
    write_old=lambda model: {
        "rotary_emb_base": model.rope.base,
        "rotary_pct": model.rope.percent,
        "rope_scaling": _write_old(model)["rope_scaling"],
    },
)
"""Field mapping for classes that may rotate a fraction of a head's width; others ignore its key."""


def _read_whole(rope: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Read the fields for a class that rotates the whole width of a head."""
    if rope.get(_SHARE, 1.0) != 1:
        raise ConfigError(
            f"rope_parameters with {_SHARE} = {rope[_SHARE]} are not supported for {model_type}: "
            "its class in transformers ignores this key; remove it to get what the class computes"
        )
    return read_rope(rope, model_type)


def _read_both(config: Any) -> dict[str, Any]:
    whole, local = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    fields = _read_whole(local, config.model_type)
    if fields["scaling"] != "none":
        raise ConfigError(
            f"rope_parameters of sliding_attention with rope_type {local['rope_type']!r} are not "
            f"supported for {config.model_type}; supported is default"
        )
    return {"rope": {**_read_whole(whole, config.model_type), "local_base": fields["base"]}}


def _write_both(model: ModelConfig) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": model.rope.local_base}
    return {"rope_parameters": {"full_attention": write_rope(model), "sliding_attention": local}}


def _without_local_base(model: ModelConfig) -> Iterator[Misfit]:
    if model.rope.local_base is None:
        yield Misfit("rope.local_base", None, "a number")
    yield from _without("percent")(model)


ROPE_BY_WINDOW = FieldMapping(
    ("rope",),
    _read_both,
    _write_both,
    _without_local_base,
    lambda model: {**_write_old(model), "rope_local_base_freq": model.rope.local_base},
)
"""Field mapping for classes with separate rope parameters for layers with a sliding window."""

ROPE = FieldMapping(
    ("rope",),
    lambda config: {"rope": _read_whole(config.rope_parameters, config.model_type)},
    lambda model: {"rope_parameters": write_rope(model)},
    _without("local_base", "percent"),
    write_old=_write_old,
)
