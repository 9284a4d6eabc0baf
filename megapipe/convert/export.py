"""Export of a checkpoint as a folder that transformers loads, written tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_model
from megapipe.config.model import ModelConfig
from megapipe.convert.adapters import Adapters
from megapipe.convert.atomic_folder import atomic_folder
from megapipe.convert.class_check import check_class
from megapipe.convert.shards import Named, plan, write
from megapipe.convert.tokenizer import opens_documents, same_ids, save_tokenizer
from megapipe.convert.weight_source import CONFIG, KIND
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.gpt.hf.config import config_to_hf, old_keys, row_of
from megapipe.model.gpt.hf.table import HFClass
from megapipe.model.gpt.hf.weights import TensorMapping, entries
from megapipe.util.dtypes import Dtype
from megapipe.util.paths import is_file, user_path
from megapipe.util.user_code import is_class_name

GENERATION = "generation_config.json"
NO_TOKENIZER = "none"


@dataclass(frozen=True)
class ExportedWeights:
    """Tensors made on demand from a checkpoint, with adapters merged; none is kept in memory."""

    checkpoint: Checkpoint
    model: ModelConfig
    entries: list[TensorMapping]
    dtype: Dtype
    """Type of the weights; buffers have at least fp32."""
    adapters: Adapters

    @classmethod
    def of_class(
        cls, checkpoint: Checkpoint, row: HFClass, dtype: Dtype | None, *, in_files: bool = True
    ) -> ExportedWeights:
        """Return the tensors of the Hugging Face class `row`, which expresses the model.
        `in_files`: use the names of the class's files, not those of its state dict. Raises
        CheckpointError if the checkpoint's tensors are not the model's."""
        model = stored_model(checkpoint.config)
        found = list(entries(row, model, in_files=in_files))
        adapters = Adapters.of(checkpoint, model)
        own = {f"{KIND}{entry.name}": entry.shape for entry in found}
        checkpoint.match(own | adapters.shapes())
        return cls(checkpoint, model, found, dtype or model.dtype, adapters)

    def named(self) -> list[Named]:
        """Return name, shape and type of each tensor, in the order of :meth:`values`."""
        return [
            (name, shape, self.type_of(entry))
            for entry in self.entries
            for name, shape in zip(entry.hf_names, entry.hf_shapes(self.model), strict=True)
        ]

    def type_of(self, entry: TensorMapping) -> Dtype:
        """Return the number type in which the tensors of `entry` are written."""
        return "fp32" if entry.is_buffer and self.dtype != "fp64" else self.dtype

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name; one global tensor is read at a time. Raises
        CheckpointError for damage, and for a value that `dtype` cannot hold."""
        for entry in self.entries:
            stored = self.checkpoint.read(f"{KIND}{entry.name}")
            tensor = self.adapters.merged(entry.name, stored)
            rounded = tensor.to(TORCH_DTYPES[self.type_of(entry)])
            if rounded.isinf().any() and not tensor.isinf().any():
                raise CheckpointError(
                    f"{self.checkpoint.path}: entry '{KIND}{entry.name}' has values up to "
                    f"{tensor.abs().max().item():g}, {self.dtype} holds "
                    f"{torch.finfo(rounded.dtype).max:g} at most; choose another --dtype"
                )
            del stored, tensor
            yield from zip(entry.hf_names, entry.transform.split(rounded, self.model), strict=True)


class Exported(Protocol):
    """A model in the form of its Hugging Face class."""

    @property
    def model_type(self) -> str:
        """The class's name for its configuration."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_positions(self) -> int:
        """Maximum sequence length that the configuration declares."""

    def named(self) -> list[Named]:
        """Return name, shape and type of each tensor, in the order of :meth:`values`."""

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor with its name."""

    def write_config(self, folder: Path, **extra: Any) -> Any:
        """Write ``config.json`` and return the config. `extra`: the tokenizer's special tokens, for
        a class that has none of its own."""


@dataclass(frozen=True)
class _OfFamily:
    """A model of the built-in family in the form of a class that expresses it."""

    row: HFClass
    weights: ExportedWeights
    is_checked: bool
    """Whether the class is known to compute the same model."""

    @property
    def model_type(self) -> str:
        return self.row.model_type

    @property
    def vocab_size(self) -> int:
        return self.weights.model.vocab_size or 0

    @property
    def max_positions(self) -> int:
        return self.weights.model.max_positions or 0

    def named(self) -> list[Named]:
        return self.weights.named()

    def values(self) -> Iterator[tuple[str, Tensor]]:
        return self.weights.values()

    def write_config(self, folder: Path, **extra: Any) -> Any:
        return write_config(folder, self.row, self.weights, is_checked=self.is_checked, **extra)


def export(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: Dtype | None = None,
    model_type: str | None = None,
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
    is_checked: bool = False,
    report: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the weights, config, generation config and tokenizer of `checkpoint` to `output`.

    Args:
        checkpoint: of any layout; only its weights are read, one global tensor at a time.
        output: a folder that does not exist; it appears when everything is written.
        dtype: type of the weights; default: the type in which the model computes.
        model_type: the class; default: the first in the table that can express the model.
        shard_bytes: maximum bytes of a file, unless a single tensor has more.
        tokenizer: as ``data.tokenizer``; default: the run's tokenizer; "none": write none.
        is_checked: whether :func:`check_export` has been called for this model.
        tell: called with a line for each file of weights.
        warn: called with a line if the tokenizer has no files, or if ``AutoTokenizer``, with the
            files, returns other ids or begins a text differently from ``generate``.

    Raises:
        ConfigError: no class can express the model, the class computes another model from the
            written config, or the tokenizer has more ids than the model.
        DataError: the tokenizer cannot be loaded.
        CheckpointError: the checkpoint is damaged, `dtype` cannot hold a value, or `output` exists.
    """
    exported = _exported(checkpoint, dtype, model_type, is_checked=is_checked)
    name = tokenizer or str(checkpoint.config["data.tokenizer"])
    loaded = None if name == NO_TOKENIZER else load_tokenizer(name)
    if loaded is not None and loaded.vocab_size > exported.vocab_size:
        raise ConfigError(
            f"tokenizer {name} has {loaded.vocab_size} ids, the model of {checkpoint.path} "
            f"has {exported.vocab_size}: pass the tokenizer that the model was trained with "
            "(--tokenizer)"
        )
    end = {} if loaded is None else {"bos_token_id": loaded.eod, "eos_token_id": loaded.eod}
    with atomic_folder(output) as folder:
        config = exported.write_config(folder, **end)
        if loaded is not None:
            if not save_tokenizer(loaded, name, folder, exported.max_positions, opens=True):
                warn(
                    f"tokenizer {name} has no files that transformers reads: the export "
                    "has no tokenizer"
                )
            elif not same_ids(loaded, folder):
                warn(
                    f"AutoTokenizer has its own class for {exported.model_type}, with other ids "
                    f"than tokenizer {name}: load {output} with PreTrainedTokenizerFast"
                )
            elif not opens_documents(loaded, folder):
                warn(
                    f"with the files of tokenizer {name} AutoTokenizer does not begin a text "
                    "as in training: call it with add_special_tokens=False, and put token "
                    f"{loaded.eod} before the ids"
                )
        _write_generation(config, name, folder)
        planned = plan(exported.named(), shard_bytes)
        write(folder, planned, exported.values(), report)


def _exported(
    checkpoint: Checkpoint, dtype: Dtype | None, model_type: str | None, *, is_checked: bool
) -> Exported:
    """Return a checkpoint's model in the form of its class."""
    model = stored_model(checkpoint.config)
    if not is_class_name(model.source):
        row = class_of_run(checkpoint, model_type)
        return _OfFamily(row, ExportedWeights.of_class(checkpoint, row, dtype), is_checked)
    from megapipe.convert.class_export import ExportedClass  # loads transformers

    exported = ExportedClass.of(checkpoint, model, dtype)
    if model_type not in (None, exported.model_type):
        raise ConfigError(
            f"{checkpoint.path}: --model-type {model_type}: the model is a class of "
            f"{exported.model_type}, which the export has too"
        )
    return exported


def check_export(model: ModelConfig) -> None:
    """Compare a resolved model, at toy width, with the class that it would be exported as. Raises
    ConfigError if no class can express the model, or the class computes another model. A class of
    transformers is exported as itself, and not compared."""
    if is_class_name(model.source):
        return
    row = row_of(model)
    config = config_to_hf(model, row.model_type)
    check_class(type(config).from_dict(config.to_dict() | old_keys(row, model)), model)


def class_of_run(checkpoint: Checkpoint, model_type: str | None) -> HFClass:
    """Return the class that expresses a checkpoint's model: `model_type`, or the first in the table
    that can. Raises ConfigError if there is none."""
    model = stored_model(checkpoint.config)
    if model.source is not None:
        raise ConfigError(
            f"{checkpoint.path} has the user model model.source={model.source}, which no "
            "Hugging Face class expresses"
        )
    return row_of(model, model_type)


def write_config(
    folder: Path, row: HFClass, weights: ExportedWeights, *, is_checked: bool = False, **extra: Any
) -> Any:
    """Write the class's ``config.json``, with further keys `extra`, and return the config. Raises
    ConfigError if the class computes another model from the config."""
    model = weights.model.model_copy(update={"dtype": weights.dtype})
    config = config_to_hf(model, row.model_type, architectures=[row.model_class], **extra)
    old = old_keys(row, model)
    if not is_checked:
        check_class(type(config).from_dict(config.to_dict() | old), model)
    config.save_pretrained(folder)
    path = folder / CONFIG
    text = json.dumps(json.loads(path.read_text()) | old, indent=2, sort_keys=True)
    path.write_text(f"{text}\n")
    return config


def _write_generation(config: Any, tokenizer: str, folder: Path) -> None:
    """Write the generation config: the tokenizer folder's, or one made from `config`."""
    given = user_path(tokenizer) / GENERATION
    if is_file(given):
        shutil.copyfile(given, folder / GENERATION)
        return
    from transformers import GenerationConfig

    GenerationConfig.from_model_config(config).save_pretrained(folder)
