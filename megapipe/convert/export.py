"""A checkpoint as a folder that transformers loads, written tensor by tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.reader import Checkpoint
from megapipe.cli import stored_model
from megapipe.convert.fresh import fresh_folder
from megapipe.convert.shards import plan, write
from megapipe.convert.tokenizer import same_ids, save_tokenizer
from megapipe.data.tokenizer import load_tokenizer
from megapipe.dtypes import Dtype
from megapipe.errors import CheckpointError, ConfigError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf.config import config_to_hf, row_of
from megapipe.model.gpt.hf.weights import Entry, entries

GENERATION = "generation_config.json"
NO_TOKENIZER = "none"


def export(
    checkpoint: Checkpoint,
    output: Path,
    *,
    dtype: Dtype | None = None,
    model_type: str | None = None,
    shard_bytes: int = 5 * 10**9,
    tokenizer: str | None = None,
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
        tell: is given a line for each file of weights.
        warn: is given a line where the tokenizer has no files, or where ``AutoTokenizer`` makes
            other ids by them.

    Raises:
        ConfigError: no class can express the model, or the tokenizer has more ids than the model.
        DataError: the tokenizer cannot be loaded.
        CheckpointError: damage; a value that `dtype` does not hold; `output` exists.
    """
    stored = checkpoint.manifest.config
    model = stored_model(stored)
    if model.source is not None:
        raise ConfigError(
            f"{checkpoint.path} is of model.source={model.source}, a model of your own, which no "
            "class of Hugging Face's expresses"
        )
    row = row_of(model, model_type)
    dtype = dtype or model.dtype
    found = list(entries(row, model))
    checkpoint.match({f"model/{entry.name}": entry.shape for entry in found})
    name = tokenizer or str(stored["data.tokenizer"])
    loaded = None if name == NO_TOKENIZER else load_tokenizer(name)
    if loaded is not None and loaded.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"tokenizer {name} has {loaded.vocab_size} ids, the model of {checkpoint.path} has "
            f"{model.vocab_size}; give the one it was trained with (--tokenizer)"
        )
    end = {} if loaded is None else {"bos_token_id": loaded.eod, "eos_token_id": loaded.eod}
    config = config_to_hf(
        model.model_copy(update={"dtype": dtype}),
        row.model_type,
        architectures=[row.model_class],
        **end,
    )
    named = [
        pair for entry in found for pair in zip(entry.hf_names, entry.hf_shapes(model), strict=True)
    ]
    with fresh_folder(output) as folder:
        config.save_pretrained(folder)
        if loaded is not None:
            if not save_tokenizer(loaded, name, folder, model.max_positions or 0):
                warn(f"tokenizer {name} has no files that transformers reads: left out")
            elif not same_ids(loaded, folder):
                warn(
                    f"AutoTokenizer takes a class of its own for {row.model_type}, which gives "
                    f"other ids than tokenizer {name}; load {output} by PreTrainedTokenizerFast"
                )
        _write_generation(config, name, folder)
        values = _values(checkpoint, found, model, dtype)
        write(folder, plan(named, dtype, shard_bytes), dtype, values, tell)


def _write_generation(config: Any, tokenizer: str, folder: Path) -> None:
    """How texts are sampled: as a file beside the tokenizer says, else the ends of texts alone."""
    given = Path(tokenizer).expanduser() / GENERATION
    if given.is_file():
        shutil.copyfile(given, folder / GENERATION)
        return
    from transformers import GenerationConfig

    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _values(
    checkpoint: Checkpoint, found: list[Entry], model: ModelConfig, dtype: Dtype
) -> Iterator[tuple[str, Tensor]]:
    """The class' tensors, of one global tensor after the other."""
    for entry in found:
        tensor = checkpoint.read(f"model/{entry.name}")
        rounded = tensor.to(TORCH_DTYPES[dtype])
        if rounded.isinf().any() and not tensor.isinf().any():
            raise CheckpointError(
                f"{checkpoint.path}: entry 'model/{entry.name}' has values up to "
                f"{tensor.abs().max().item():g}, {dtype} holds "
                f"{torch.finfo(rounded.dtype).max:g} at most; choose another --dtype"
            )
        del tensor
        yield from zip(entry.hf_names, entry.way.split(rounded, model), strict=True)
