"""Reads and writes configs of Hugging Face classes (:mod:`megapipe.model.gpt.hf.table`).

A value that the class or megapipe cannot express is refused by its name. Needs no torch.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megapipe.command_line import phase
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.field_mappings import require
from megapipe.model.gpt.hf.table import TABLE, HFClass
from megapipe.text import together

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def config_from_hf(hf_config: Any) -> ModelConfig:
    """Return the resolved model of a Hugging Face config, in fp32.

    Raises:
        ConfigError: the architecture, or a feature that the config asks for, is not supported.
    """
    model_type = getattr(hf_config, "model_type", type(hf_config).__name__)
    row = TABLE.get(model_type)
    if row is None:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported are {together(list(TABLE))}"
        )
    fields = dict(row.fixed)
    try:
        for key, wanted in row.required.items():
            require(hf_config, key, wanted)
        for part in row.parts:
            fields |= part.read(hf_config)
    except AttributeError as error:
        if error.obj is not hf_config:
            raise
        raise ConfigError(
            f"the {model_type} config has no {error.name}, which is needed"
        ) from error
    try:
        model = ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the {model_type} config gives model.{first['loc'][0]} = {first['input']!r}: "
            f"{first['msg']}"
        ) from error
    model = model.resolved(vocab_size=None, sequence_length=0)
    row_of(model, model_type)
    return model


def config_to_hf(model: ModelConfig, model_type: str | None = None, **extra: Any) -> Any:
    """Return the config of a resolved model, for the class that :func:`row_of` finds.

    Args:
        model: the resolved model. Only GPT-2 has dropout.
        model_type: the class; default: the first that can express the model.
        extra: further arguments of the config class, such as `bos_token_id` (default: no special
            tokens).

    Raises:
        ConfigError: the class, or every class, cannot express the model.
    """
    row = row_of(model, model_type)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    keys: dict[str, Any] = {**special, **row.required}
    for part in row.parts:
        keys |= part.write(model)
    keys["dtype"] = _DTYPES[model.dtype]
    return class_named(row.config_class)(**(keys | extra))


def old_keys(row: HFClass, model: ModelConfig) -> dict[str, Any]:
    """Return old names of keys with their values. transformers before version 5 needs them in
    config.json too; version 5 accepts them."""
    return {key: value for part in row.parts for key, value in part.write_old(model).items()}


def class_of(model: ModelConfig, model_type: str | None = None) -> Any:
    """Return transformers' class for a resolved model, with the LM head."""
    return class_named(row_of(model, model_type).model_class)


def class_named(name: str) -> Any:
    """Load a class of transformers; importing the package takes seconds."""
    with phase("loading transformers"):
        import transformers

        return getattr(transformers, name)


def has_class(model: ModelConfig) -> bool:
    """Whether a class in the table can express a resolved model."""
    return model.source is None and any(not list(row.misfits(model)) for row in TABLE.values())


def row_of(model: ModelConfig, model_type: str | None = None) -> HFClass:
    """Return the table's entry for a resolved model: that of `model_type`, or by default the first
    that can express the model.

    Raises:
        ConfigError: `model_type`, or every class, cannot express the model; the error names what
            the nearest class lacks. Or a size of the model is not resolved.
    """
    for field in ("kv_heads", "head_dim", "ffn_hidden", "vocab_size", "max_positions"):
        if getattr(model, field) is None:
            raise ConfigError(f"model.{field} is not set; pass a resolved model")
    rows = list(TABLE.values()) if model_type is None else [TABLE[model_type]]
    found = [(row, list(row.misfits(model))) for row in rows]
    mixture = model.moe.num_experts is not None
    row, misfits = min(found, key=lambda each: (each[0].has_experts != mixture, len(each[1])))
    if misfits:
        what, value, wanted = misfits[0]
        raise ConfigError(
            f"model.{what} = {value} cannot be expressed by Hugging Face's {row.model_type} class"
            f"{'' if model_type else ' (the nearest)'}; it needs {wanted}"
        )
    return row
