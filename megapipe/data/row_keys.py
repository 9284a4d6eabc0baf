"""Keys of `data` that name fields of rows."""

from __future__ import annotations

from megapipe.data_config import DataConfig
from megapipe.errors import ConfigError
from megapipe.unused_keys import refuse_unused

OF_EXAMPLES = (
    "prompt_field",
    "completion_field",
    "messages_field",
    "chat_template",
    "train_on",
)
"""Keys that only examples have a use for."""
SUPERVISED = "data.samples=supervised"


def check_fields(data: DataConfig) -> None:
    """Raise :class:`ConfigError` for fields of rows that ``data.samples`` does not read."""
    if data.samples == "supervised":
        refuse_unused("data", data, ["text_field"], f"with {SUPERVISED}", "")
        for name, mixed in data.mixture.items():
            refuse_unused(f"data.mixture.{name}", mixed, ["text_field"], f"with {SUPERVISED}", "")
    else:
        refuse_unused("data", data, OF_EXAMPLES, f"without {SUPERVISED}")


def no_rows(key: str, source: str) -> ConfigError:
    """Return the error for a source of examples that has none."""
    return ConfigError(
        f"{SUPERVISED}, and {key}={source} has no rows: expected JSON, parquet or a "
        "data set, with fields of messages, or of prompt and completion"
    )
