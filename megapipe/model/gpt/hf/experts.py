"""Keys of classes with experts as parts of a config map.

A part has the section `model.moe` but for what only training knows (:data:`TRAINING`), and the
width of dense layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from megapipe.errors import ConfigError
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf.parts import Misfit, Part
from megapipe.model.gpt.moe_checks import check_experts
from megapipe.model.gpt.moe_config import MoEConfig

TRAINING = (
    *("router_init_scale", "jitter", "second"),
    *("balance", "balance_scope", "balance_choices", "z"),
)
"""Fields that change no output of a model."""


class Layers(NamedTuple):
    """Which layers have experts, and how a class' config says so."""

    read: Callable[[Any], dict[str, Any]]
    """From a class' config: fields of the section."""
    write: Callable[[ModelConfig], dict[str, Any]]
    misfits: Callable[[ModelConfig], Iterator[Misfit]]


def _experts(
    fields: Mapping[str, str], layers: Layers, width: str, fixed: Mapping[str, Any]
) -> Part:
    """A part of a class.

    Args:
        fields: its keys, by our fields of the section, whose values are the same.
        layers: which layers have experts.
        width: the key for the width of dense layers.
        fixed: fields that the class always has so; all others must have their defaults.
    """

    def read(config: Any) -> dict[str, Any]:
        found = {ours: getattr(config, theirs) for ours, theirs in fields.items()}
        given = {"layers": config.num_hidden_layers, "ffn_hidden": getattr(config, width)}
        try:
            moe = MoEConfig.model_validate({**fixed, **found, **layers.read(config)})
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
        dense = {width: model.ffn_hidden}
        return dense | {t: getattr(model.moe, o) for o, t in fields.items()} | layers.write(model)

    def misfits(model: ModelConfig) -> Iterator[Misfit]:
        if model.moe.experts is None:
            yield Misfit("moe.experts", None, "a number")
            return
        yield from layers.misfits(model)
        for name in MoEConfig.model_fields:
            if name in (*fields, *TRAINING, *_OF_LAYERS):
                continue
            wanted = fixed.get(name, _default(name))
            if getattr(model.moe, name) != wanted:
                yield Misfit(f"moe.{name}", getattr(model.moe, name), str(wanted))

    return Part(("moe", "ffn_hidden"), read, write, misfits)


_OF_LAYERS = ("dense_first", "every", "dense_layers")


def _told(config: Any, fields: Mapping[str, str]) -> str:
    return ", ".join(f"{key} = {getattr(config, key)}" for key in fields.values())


def _why(error: ValidationError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    first = error.errors()[0]
    return f"model.moe.{first['loc'][0]} = {first['input']!r}: {first['msg']}"


def _default(field: str) -> Any:
    return MoEConfig.model_fields[field].get_default(call_default_factory=True)


def _dense_layers(model: ModelConfig) -> Iterator[Misfit]:
    for field in _OF_LAYERS:
        if getattr(model.moe, field) != _default(field):
            yield Misfit(f"moe.{field}", getattr(model.moe, field), str(_default(field)))


_ALL = Layers(lambda config: {}, lambda model: {}, _dense_layers)


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


def _none(model: ModelConfig) -> Iterator[Misfit]:
    yield from ()


_LISTED = Layers(_read_listed, _write_listed, _none)
"""In every so many-th layer, but for those that are named."""

_ONE_GROUP = {"groups": 1, "group_top_k": 1}

MIXTRAL_EXPERTS = _experts(
    {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "ffn": "intermediate_size"},
    _ALL,
    "intermediate_size",
    _ONE_GROUP,
)

QWEN3_EXPERTS = _experts(
    {
        "experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "normalise": "norm_topk_prob",
    },
    _LISTED,
    "intermediate_size",
    _ONE_GROUP,
)
