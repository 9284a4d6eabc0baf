"""A model without its weights: sizes, tokenizer, and how its texts begin and end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from megapipe.checkpoint.stateful import TensorReader
from megapipe.cli import stored_lora, stored_model
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.convert.export import GENERATION
from megapipe.convert.import_model import has_tokenizer
from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.layers.lora_specs import Lora

_READ = ("sample_format", "document_mask", "reset_position_ids", "chat_template")
"""Settings of ``data`` that determine how a model reads texts."""


@dataclass(frozen=True)
class ModelInfo:
    """A model as its checkpoint or Hugging Face folder describes it."""

    model: ModelConfig
    lora: Lora | None
    """LoRA adapters of the model, if any; their weights are not merged."""
    tokenizer: Tokenizer
    context: int
    """Maximum number of tokens that the model sees at a time."""
    opening: tuple[int, ...]
    """Tokens before a text: for a run's model the end-of-document token, otherwise the tokens that
    the tokenizer prepends, if any."""
    ends: frozenset[int]
    """Tokens that end a text: EOS tokens of the tokenizer and of the generation config."""
    data: DataConfig
    """Settings that determine how the run read its texts; defaults for a Hugging Face model."""

    @property
    def start(self) -> tuple[int, ...]:
        """First tokens of an empty text: `opening` or, if that is empty, the end-of-document id."""
        return self.opening or (self.tokenizer.eod,)

    @classmethod
    def of(
        cls, weights: TensorReader, *, tokenizer: str | None = None, context: int | None = None
    ) -> ModelInfo:
        """Read model, tokenizer and context from a checkpoint or a Hugging Face folder.

        Args: tokenizer: name of the tokenizer, as in ``data.tokenizer``; default: the run's or the
        folder's. context: default: the sequence length of the run, or the model's number of
        positions.

        Raises:
            DataError: there is no tokenizer, or it cannot be loaded.
            ConfigError: the tokenizer has more ids than the model, or no context length is known.
        """
        stored = weights.config
        model = stored_model(stored)
        of_run = "data.tokenizer" in stored
        name = tokenizer or _tokenizer_of(weights)
        loaded = load_tokenizer(name)
        if model.vocab_size is None or loaded.vocab_size > model.vocab_size:
            raise ConfigError(
                f"tokenizer {name} has {loaded.vocab_size} ids, the checkpoint's model "
                f"{model.vocab_size}"
            )
        length = context or stored.get("train.sequence_length") or model.max_positions
        if not isinstance(length, int):
            raise ConfigError(f"{weights.path} does not record a sequence length: pass --context")
        known = {key: stored[f"data.{key}"] for key in _READ if f"data.{key}" in stored}
        return cls(
            model=model,
            lora=Lora.of(stored_lora(stored)),
            tokenizer=loaded,
            context=length,
            opening=(loaded.eod,) if of_run else loaded.bos_tokens,
            ends=frozenset({loaded.eod, *_ends_beside(Path(name), *_here(weights))}),
            data=DataConfig.model_validate(known),
        )


def _tokenizer_of(weights: TensorReader) -> str:
    stored: JsonValue = weights.config.get("data.tokenizer")
    if stored is not None:
        return str(stored)
    for path in _here(weights):
        if has_tokenizer(path):
            return str(path)
    raise DataError(f"{weights.path} has no tokenizer: pass --tokenizer")


def _here(weights: TensorReader) -> list[Path]:
    """Return the folder of the weights in a list; [] on object storage, which has only weights."""
    return [weights.path] if isinstance(weights.path, Path) else []


def _ends_beside(*folders: Path) -> set[int]:
    """Return the end-of-text ids in the generation config of the first folder that has one."""
    for folder in folders:
        path = folder / GENERATION
        if not path.is_file():
            continue
        try:
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path}: no generation config ({error})") from error
        ids = found if isinstance(found, list) else [found]
        return {token for token in ids if isinstance(token, int)}
    return set()
