"""Mappings between fields of :class:`ModelConfig` and keys of a Hugging Face class's config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError


class Misfit(NamedTuple):
    """A field of the model, or a value derived from fields, that a class cannot express."""

    what: str
    value: Any
    wanted: str


def _none(model: ModelConfig) -> Iterator[Misfit]:
    yield from ()


class FieldMapping(NamedTuple):
    """Some fields of the model, with functions from and to keys of a class's config."""

    fields: tuple[str, ...]
    read: Callable[[Any], dict[str, Any]]
    """Function from a class's config to the fields; raises ConfigError for an unsupported value."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Function from a model without misfits to the class's keys."""
    misfits: Callable[[ModelConfig], Iterator[Misfit]] = _none
    write_old: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Function from a model to further keys, which only transformers before 5 reads."""


def pairs(**names: str) -> FieldMapping:
    """Map each field of `names` (field=key) to the key with the same value."""
    return FieldMapping(
        tuple(names),
        lambda config: {ours: getattr(config, theirs) for ours, theirs in names.items()},
        lambda model: {theirs: getattr(model, ours) for ours, theirs in names.items()},
    )


def pair_or(field: str, key: str, default: Any) -> FieldMapping:
    """Map a field to a key with the same value; a config without the key means `default`."""
    return FieldMapping(
        (field,),
        lambda config: {field: getattr(config, key, default)},
        lambda model: {key: getattr(model, field)},
    )


def equal(field: str, *keys: str) -> FieldMapping:
    """Map a field to several keys, which must all have its value."""

    def read(config: Any) -> dict[str, Any]:
        first = getattr(config, keys[0])
        for key in keys[1:]:
            require(config, key, first, f"as {keys[0]}")
        return {field: first}

    return FieldMapping((field,), read, lambda model: dict.fromkeys(keys, getattr(model, field)))


def activation(key: str, names: Mapping[str, str]) -> FieldMapping:
    """Map ``model.activation`` to `key`. `names`: megapipe's name by the class's name. If the class
    has several names for an activation, the first is written."""

    def read(config: Any) -> dict[str, Any]:
        value = getattr(config, key)
        if value not in names:
            raise ConfigError(
                f"{key} {value!r} is not supported for {config.model_type}; "
                f"supported are {', '.join(names)}"
            )
        return {"activation": names[value]}

    def write(model: ModelConfig) -> dict[str, Any]:
        return {key: next(theirs for theirs, ours in names.items() if ours == model.activation)}

    def misfits(model: ModelConfig) -> Iterator[Misfit]:
        if model.activation not in names.values():
            known = " or ".join(sorted(set(names.values())))
            yield Misfit("activation", model.activation, known)

    return FieldMapping(("activation",), read, write, misfits)


def _read_whole_heads(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {"kv_heads": heads, "head_dim": config.hidden_size // heads}


def _split_heads(model: ModelConfig) -> Iterator[Misfit]:
    if model.kv_heads != model.heads:
        yield Misfit("kv_heads", model.kv_heads, str(model.heads))
    yield from _other_width(model)


def _other_width(model: ModelConfig) -> Iterator[Misfit]:
    yield from _uneven_groups(model)
    width = model.heads * (model.head_dim or 0)
    if width != model.hidden:
        yield Misfit("heads x model.head_dim", width, str(model.hidden))


WHOLE_HEADS = FieldMapping(
    ("kv_heads", "head_dim"), _read_whole_heads, lambda model: {}, _split_heads
)
"""Field mapping for classes without keys for KV heads and head width: there are as many KV heads as
query heads, and the head width is hidden / heads."""


def _uneven_groups(model: ModelConfig) -> Iterator[Misfit]:
    rest = model.heads % (model.kv_heads or 1)
    if rest:
        yield Misfit("heads % model.kv_heads", rest, "0")


def _uneven(model: ModelConfig) -> Iterator[Misfit]:
    yield from _uneven_groups(model)
    if model.hidden % model.heads:
        yield Misfit("hidden % model.heads", model.hidden % model.heads, "0")


APART_HEADS = pairs(kv_heads="num_key_value_heads", head_dim="head_dim")._replace(
    misfits=_uneven_groups
)
"""Field mapping for classes with a key for the KV heads and one for the head width."""
GROUPED_HEADS = APART_HEADS._replace(misfits=_uneven)
"""Variant of APART_HEADS for classes in which `heads` must divide `hidden`."""

APART_HEADS_OR_SHARED_OUT = APART_HEADS._replace(
    read=lambda config: {
        "kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
    }
)
"""Variant of APART_HEADS for configs that may lack the head width; default: hidden / heads."""

GROUPED_WHOLE_HEADS = FieldMapping(
    ("kv_heads", "head_dim"),
    lambda config: {
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
    },
    lambda model: {"num_key_value_heads": model.kv_heads},
    _other_width,
)
"""Field mapping for classes with a key for the KV heads and a head width of hidden / heads."""


def require(config: Any, key: str, wanted: Any, reason: str = "") -> None:
    """Raise ConfigError unless `key` of a config has the value `wanted`, the only supported one."""
    value = getattr(config, key)
    if value != wanted:
        must = f"{wanted}, {reason}" if reason else f"{wanted}"
        raise ConfigError(
            f"{key} = {value} is not supported for {config.model_type}; it must be {must}"
        )


def _read_layers(config: Any) -> dict[str, Any]:
    kinds, window = list(config.layer_types), config.sliding_window
    if "sliding_attention" not in kinds:
        return {"sliding_window": None, "full_attention_every": None}
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else None
    if kinds != _layer_types(len(kinds), every):
        raise ConfigError(
            f"layer_types {kinds} are not supported for {config.model_type}; supported: full "
            "attention in every n-th layer, sliding in all others"
        )
    return {"sliding_window": window, "full_attention_every": every}


def _write_layers(model: ModelConfig) -> dict[str, Any]:
    if model.sliding_window is None:
        return {"layer_types": ["full_attention"] * model.layers}
    types = _layer_types(model.layers, model.full_attention_every)
    return {"sliding_window": model.sliding_window, "layer_types": types}


def _layer_types(layers: int, every: int | None) -> list[str]:
    is_full = [every is not None and (layer + 1) % every == 0 for layer in range(layers)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


WINDOWS = FieldMapping(("sliding_window", "full_attention_every"), _read_layers, _write_layers)
"""Field mapping for classes in which some layers may have a sliding window."""


def _query_scalar(model: ModelConfig) -> int:
    return (
        model.head_dim or 1 if model.attention_scale is None else round(model.attention_scale**-2)
    )


def _other_scale(model: ModelConfig) -> Iterator[Misfit]:
    wanted = _query_scalar(model) ** -0.5
    if model.attention_scale not in (None, wanted):
        yield Misfit("attention_scale", model.attention_scale, "1 / sqrt of a whole number")


def _read_scale(config: Any) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar
    return {"attention_scale": None if scalar == config.head_dim else scalar**-0.5}


QUERY_SCALE = FieldMapping(
    ("attention_scale",),
    _read_scale,
    lambda model: {"query_pre_attn_scalar": _query_scalar(model)},
    _other_scale,
)
"""Field mapping for classes with a key for a number n: scores are scaled by 1 / sqrt(n)."""


def of_hidden(field: str, value: Callable[[int], Any], words: str) -> FieldMapping:
    """Map a field that has no key: the class computes it as `value` of the model's hidden size.
    `words`: this formula as text, for errors."""

    def misfits(model: ModelConfig) -> Iterator[Misfit]:
        if getattr(model, field) != value(model.hidden):
            yield Misfit(field, getattr(model, field), f"{value(model.hidden)} ({words})")

    return FieldMapping(
        (field,), lambda config: {field: value(config.hidden_size)}, lambda model: {}, misfits
    )
