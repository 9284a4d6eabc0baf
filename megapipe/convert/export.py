"""A checkpoint as a folder that transformers loads, written tensor by tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_model
from megapipe.config.model import ModelConfig
from megapipe.convert.adapters import Adapters
from megapipe.convert.class_check import check_class
from megapipe.convert.fresh import atomic_folder
from megapipe.convert.shards import Named, plan, write
from megapipe.convert.source import CONFIG, KIND
from megapipe.convert.tokenizer import opens_documents, same_ids, save_tokenizer
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.gpt.hf.config import config_to_hf, old_keys, row_of
from megapipe.model.gpt.hf.table import HFClass
from megapipe.model.gpt.hf.weights import TensorMapping, entries
from megapipe.util.dtypes import Dtype
from megapipe.util.paths import is_file, user_path

GENERATION = "generation_config.json"
NO_TOKENIZER = "none"


@dataclass(frozen=True)
class ExportedWeights:
    """Tensors that are made of a checkpoint's, none of which is held; adapters are merged."""

    checkpoint: Checkpoint
    model: ModelConfig
    entries: list[TensorMapping]
    dtype: Dtype
    """Type of the tensors, but for buffers, which keep fp32 at least."""
    adapters: Adapters

    @classmethod
    def of_class(
        cls, checkpoint: Checkpoint, row: HFClass, dtype: Dtype | None, *, in_files: bool = True
    ) -> ExportedWeights:
        """Those of a class of Hugging Face's that expresses the model, named as in files or as in
        its state dict. Raises CheckpointError if the checkpoint's tensors are not those of its
        model."""
        model = stored_model(checkpoint.config)
        found = list(entries(row, model, in_files=in_files))
        adapters = Adapters.of(checkpoint, model)
        own = {f"{KIND}{entry.name}": entry.shape for entry in found}
        checkpoint.match(own | adapters.shapes())
        return cls(checkpoint, model, found, dtype or model.dtype, adapters)

    def named(self) -> list[Named]:
        """Names, shapes and types, in the order of :meth:`values`."""
        return [
            (name, shape, self.type_of(entry))
            for entry in self.entries
            for name, shape in zip(entry.hf_names, entry.hf_shapes(self.model), strict=True)
        ]

    def type_of(self, entry: TensorMapping) -> Dtype:
        """The type of an entry's tensors."""
        return "fp32" if entry.is_buffer and self.dtype != "fp64" else self.dtype

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name, of one global tensor after the other. Raises CheckpointError for
        damage, and for a value that `dtype` does not hold."""
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
            yield from zip(entry.hf_names, entry.way.split(rounded, self.model), strict=True)


def export(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: Dtype | None = None,
    model_type: str | None = None,
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
    is_checked: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    warn: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the weights, config, generation config and tokenizer of `checkpoint` to `output`.

    Args:
        checkpoint: of any layout; only its weights are read, one global tensor at a time.
        output: a folder that does not exist; it appears when all is written.
        dtype: type of the weights; default: the model's, in which it computes.
        model_type: the class; default: the first in the table that can express the model.
        shard_bytes: most bytes of a file, unless one tensor has more.
        tokenizer: as ``data.tokenizer``, whose value in the run is the default; none: no files.
        is_checked: :func:`check_export` has been called for this model.
        tell: is given a line for each file of weights.
        warn: is given a line where the tokenizer has no files, or where ``AutoTokenizer`` makes
            other ids by them, or begins a text otherwise than ``generate``.

    Raises:
        ConfigError: no class can express the model, the class computes another one from its config,
            or the tokenizer has more ids than the model.
        DataError: the tokenizer cannot be loaded.
        CheckpointError: damage; a value that `dtype` does not hold; `output` exists.
    """
    row = class_of_run(checkpoint, model_type)
    weights = ExportedWeights.of_class(checkpoint, row, dtype)
    model = weights.model
    name = tokenizer or str(checkpoint.config["data.tokenizer"])
    loaded = None if name == NO_TOKENIZER else load_tokenizer(name)
    if loaded is not None and loaded.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"tokenizer {name} has {loaded.vocab_size} ids, the model of {checkpoint.path} has "
            f"{model.vocab_size}; give the one it was trained with (--tokenizer)"
        )
    end = {} if loaded is None else {"bos_token_id": loaded.eod, "eos_token_id": loaded.eod}
    with atomic_folder(output) as folder:
        config = write_config(folder, row, weights, is_checked=is_checked, **end)
        if loaded is not None:
            if not save_tokenizer(loaded, name, folder, model.max_positions or 0, opens=True):
                warn(f"tokenizer {name} has no files that transformers reads: left out")
            elif not same_ids(loaded, folder):
                warn(
                    f"AutoTokenizer takes a class of its own for {row.model_type}, which gives "
                    f"other ids than tokenizer {name}; load {output} by PreTrainedTokenizerFast"
                )
            elif not opens_documents(loaded, folder):
                warn(
                    f"AutoTokenizer does not begin a text as the model knows it by the files of "
                    f"tokenizer {name}: call it with add_special_tokens=False, and put token "
                    f"{loaded.eod} before the ids"
                )
        _write_generation(config, name, folder)
        planned = plan(weights.named(), shard_bytes)
        write(folder, planned, weights.values(), tell)


def check_export(model: ModelConfig) -> None:
    """Compare a resolved model, at toy width, with the class as which it would be exported. Raises
    ConfigError if no class can express it, or the class computes another model."""
    row = row_of(model)
    config = config_to_hf(model, row.model_type)
    check_class(type(config).from_dict(config.to_dict() | old_keys(row, model)), model)


def class_of_run(checkpoint: Checkpoint, model_type: str | None) -> HFClass:
    """The class that expresses a checkpoint's model: `model_type`, or the first in the table.
    Raises ConfigError if it cannot, or none can."""
    model = stored_model(checkpoint.config)
    if model.source is not None:
        raise ConfigError(
            f"{checkpoint.path} is of model.source={model.source}, a model of your own, which no "
            "class of Hugging Face's expresses"
        )
    return row_of(model, model_type)


def write_config(
    folder: Path, row: HFClass, weights: ExportedWeights, *, is_checked: bool = False, **extra: Any
) -> Any:
    """Write the class' config.json, with `extra` keys, and return the config. Raises ConfigError if
    the class computes another model from it."""
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
    """How texts are sampled: as a file beside the tokenizer says, else the ends of texts alone."""
    given = user_path(tokenizer) / GENERATION
    if is_file(given):
        shutil.copyfile(given, folder / GENERATION)
        return
    from transformers import GenerationConfig

    GenerationConfig.from_model_config(config).save_pretrained(folder)
