"""A model beside its weights: sizes, tokenizer, how its texts begin and end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from megapipe.checkpoint.stateful import TensorReader
from megapipe.cli import stored_lora, stored_model
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.convert.adopt import has_tokenizer
from megapipe.convert.export import GENERATION
from megapipe.data.tokenizer import Tokenizer, load_tokenizer
from megapipe.errors import ConfigError, DataError
from megapipe.layers.lora_specs import Lora

_READ = ("samples", "document_mask", "reset_positions", "chat_template")
"""Keys of ``data`` by which a model reads texts."""


@dataclass(frozen=True)
class ModelInfo:
    """A model as its checkpoint, or its folder of Hugging Face's, describes it."""

    model: ModelConfig
    lora: Lora | None
    """Its adapters, which are computed beside its weights."""
    tokenizer: Tokenizer
    context: int
    """Most tokens that the model sees at a time."""
    opening: tuple[int, ...]
    """Tokens before a text: the end of the document before it in a model of a run; elsewhere those
    that the tokenizer itself puts there, and where it puts none, none."""
    ends: frozenset[int]
    """Tokens that end a text."""
    data: DataConfig
    """How the run has read its texts; defaults elsewhere."""

    @property
    def start(self) -> tuple[int, ...]:
        """`opening`, or where that is empty the end-of-document token: something to go on from."""
        return self.opening or (self.tokenizer.eod,)

    @classmethod
    def of(
        cls, weights: TensorReader, *, tokenizer: str | None = None, context: int | None = None
    ) -> ModelInfo:
        """As `weights` say of themselves.

        Args:
            tokenizer: its name, as in ``data.tokenizer``; by default that of the run or the folder.
            context: by default the length that a run trained at, or the model's positions.

        Raises:
            DataError: there is no tokenizer, or it cannot be loaded.
            ConfigError: it has more ids than the model, or no length is known.
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
            raise ConfigError(f"{weights.path} does not say how long its texts are; give --context")
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
    raise DataError(f"{weights.path} has no tokenizer; give one with --tokenizer")


def _here(weights: TensorReader) -> list[Path]:
    """The folder of the weights, unless it is on object storage, which has nothing beside them."""
    return [weights.path] if isinstance(weights.path, Path) else []


def _ends_beside(*folders: Path) -> set[int]:
    """The ids that end a text by the generation config of the first folder that has one."""
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
