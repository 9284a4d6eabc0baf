"""Values of a run that is started from a class of transformers: ``megapipe train hf:FOLDER``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError
from megapipe.util.user_code import TRANSFORMERS

MOST_TOKENS = 2048
"""Maximum sequence length that a run has by itself."""
CONTINUED: Mapping[str, Any] = {
    "optimizer.lr": 2e-5,
    "optimizer.min_lr": 2e-6,
    "train.microbatch": 1,
}
"""Values for continued pretraining, as far as they do not depend on the class."""
DTYPES = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "bf16"}
"""Number type of a run by that of a folder: fp16 would need a scaled loss."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
"""Files of which a folder with a tokenizer has at least one."""


def class_defaults(source: str, folder: Path) -> dict[str, Any]:
    """Return values of keys for continued pretraining of a class.

    Args:
        source: value of ``model.source``.
        folder: local folder of the class, or the file of a configuration alone.

    Raises:
        ConfigError: the folder has no configuration that can be read.
    """
    file = folder if folder.is_file() else folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source}: cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{source}: {file} is not JSON") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{source}: {file}: expected a JSON object")
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings") or text.get("n_positions") or MOST_TOKENS
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
    values: dict[str, Any] = {
        "model.source": source,
        "model.dtype": DTYPES.get(str(dtype), "fp32"),
        "train.sequence_length": min(MOST_TOKENS, positions),
        **CONTINUED,
    }
    if any((folder / name).is_file() for name in TOKENIZERS):
        values["data.tokenizer"] = source.removeprefix(TRANSFORMERS)
    return values


def class_notice(source: str, values: Mapping[str, Any]) -> str:
    """Return a line that says which values a run from a class has by itself."""
    said = " ".join(f"{key}={value}" for key, value in values.items() if key != "model.source")
    return f"{source}: {said} (each can be set)"
