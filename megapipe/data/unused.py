"""Refuses keys of `data` that nothing would read."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.data_config import DataConfig
from megapipe.errors import ConfigError

OF_EXAMPLES = (
    "prompt_field",
    "completion_field",
    "messages_field",
    "chat_template",
    "train_on",
)
"""Keys that only examples have a use for."""


def refuse_unused(data: DataConfig, names: Sequence[str], use: str) -> None:
    """Raise :class:`ConfigError` for keys that have a value but no use."""
    for name in names:
        value, default = getattr(data, name), DataConfig.model_fields[name].default
        if value != default:
            raise ConfigError(
                f"data.{name}={value} is for {use}: expected "
                f"{'null' if default is None else default} without"
            )


def check_fields(data: DataConfig) -> None:
    """Raise :class:`ConfigError` for fields of rows that ``data.samples`` does not read."""
    if data.samples == "supervised":
        refuse_unused(data, ("text_field",), "texts, not data.samples=supervised")
    else:
        refuse_unused(data, OF_EXAMPLES, "data.samples=supervised")


def no_rows(key: str, source: str) -> ConfigError:
    """The error for a source of examples that has none."""
    return ConfigError(
        f"data.samples=supervised, and {key}={source} has no rows: expected JSON, parquet or a "
        "data set, with fields of messages, or of prompt and completion"
    )
