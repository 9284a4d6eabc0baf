"""Parts of a config map: fields of :class:`ModelConfig` on one side, a class' keys on the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megapipe.errors import ConfigError
from megapipe.model.gpt.config import ModelConfig


class Misfit(NamedTuple):
    """A field, or what follows from some, that a class cannot express."""

    what: str
    value: Any
    wanted: str


def _none(model: ModelConfig) -> Iterator[Misfit]:
    yield from ()


class Part(NamedTuple):
    """Some fields of the model, and how a class' config has them."""

    fields: tuple[str, ...]
    read: Callable[[Any], dict[str, Any]]
    """From a class' config: their values; raises ConfigError for one that is not supported."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """The class' keys, of a model without misfits."""
    misfits: Callable[[ModelConfig], Iterator[Misfit]] = _none


def pairs(**names: str) -> Part:
    """Fields whose values a key has as they are."""
    return Part(
        tuple(names),
        lambda config: {ours: getattr(config, theirs) for ours, theirs in names.items()},
        lambda model: {theirs: getattr(model, ours) for ours, theirs in names.items()},
    )


def equal(field: str, *keys: str) -> Part:
    """A field for which the class has several keys."""

    def read(config: Any) -> dict[str, Any]:
        first = getattr(config, keys[0])
        for key in keys[1:]:
            require(config, key, first, f"as {keys[0]}")
        return {field: first}

    return Part((field,), read, lambda model: dict.fromkeys(keys, getattr(model, field)))


def activation(key: str, names: Mapping[str, str]) -> Part:
    """The activation function, `names` being ours by theirs; of several the first is written."""

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

    return Part(("activation",), read, write, misfits)


def _read_whole_heads(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {"kv_heads": heads, "head_dim": config.hidden_size // heads}


def _split_heads(model: ModelConfig) -> Iterator[Misfit]:
    if model.kv_heads != model.heads:
        yield Misfit("kv_heads", model.kv_heads, str(model.heads))
    yield from _other_width(model)


def _other_width(model: ModelConfig) -> Iterator[Misfit]:
    width = model.heads * (model.head_dim or 0)
    if width != model.hidden:
        yield Misfit("heads x model.head_dim", width, str(model.hidden))


WHOLE_HEADS = Part(("kv_heads", "head_dim"), _read_whole_heads, lambda model: {}, _split_heads)
"""Of a class without such keys: each query head has keys of its own, and all heads together have
the width of the model."""


def _uneven(model: ModelConfig) -> Iterator[Misfit]:
    for what, size, by in (
        ("heads % model.kv_heads", model.heads, model.kv_heads or 1),
        ("hidden % model.heads", model.hidden, model.heads),
    ):
        if size % by:
            yield Misfit(what, size % by, "0")


GROUPED_HEADS = pairs(kv_heads="num_key_value_heads", head_dim="head_dim")._replace(misfits=_uneven)
"""Of a class that has keys for both, and wants `hidden` to be a multiple of `heads` even so."""

GROUPED_WHOLE_HEADS = Part(
    ("kv_heads", "head_dim"),
    lambda config: {
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // config.num_attention_heads,
    },
    lambda model: {"num_key_value_heads": model.kv_heads},
    _other_width,
)
"""Of a class without a key for the width of a head: that of the model by the heads."""


def require(config: Any, key: str, wanted: Any, reason: str = "") -> None:
    """Refuse a value that cannot be expressed here."""
    value = getattr(config, key)
    if value != wanted:
        must = f"{wanted}, {reason}" if reason else f"{wanted}"
        raise ConfigError(
            f"{key} = {value} is not supported for {config.model_type}; it must be {must}"
        )
