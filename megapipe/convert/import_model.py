"""Import of a foreign model as a run folder with one checkpoint, of step 0."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megapipe.checkpoint.find import OF_A_RUN
from megapipe.checkpoint.regions import whole
from megapipe.checkpoint.writer import SHARD_BYTES, Meta, Piece, SingleProcess, save
from megapipe.cli import flatten
from megapipe.config.config import Config, TrainConfig
from megapipe.config.data import DataConfig
from megapipe.convert.atomic_folder import atomic_folder
from megapipe.convert.describe import as_configuration
from megapipe.convert.export import GENERATION
from megapipe.convert.tokenizer import save_tokenizer
from megapipe.convert.weight_source import WeightSource
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import ConfigError, DataError

CONFIGURATION = "config.yaml"
TOKENIZER = "tokenizer"
LINE_EVERY_S = 2.0
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)
"""File names of tokenizers; a folder with one of them has a tokenizer."""


def import_model(
    source: WeightSource,
    output: Path,
    *,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the weights, configuration and tokenizer of a model to a new run folder `output`.

    The weights keep their type (fp16 becomes fp32, which can hold all fp16 values). At most
    `shard_bytes` bytes of weights, or one tensor, are in memory. `tokenizer` is a name as in
    ``data.tokenizer``; default: the tokenizer in the model's folder, which is written to
    ``output/tokenizer``. `report` is called with a line of progress every few seconds.

    Raises:
        DataError: there is no tokenizer, or it cannot be loaded.
        ConfigError: the tokenizer has more ids than the model.
        CheckpointError: the weights are damaged, or `output` exists.
    """
    own = tokenizer is None
    name = str(source.path) if tokenizer is None else tokenizer
    if own and not has_tokenizer(source.path):
        raise DataError(f"{source.path} has no tokenizer: pass --tokenizer")
    loaded = load_tokenizer(name)
    model = source.model
    if loaded.vocab_size > (model.vocab_size or 0):
        raise ConfigError(
            f"tokenizer {name} has {loaded.vocab_size} ids, the model of {source.path} has "
            f"{model.vocab_size}"
        )
    stays_at = str(output.absolute() / TOKENIZER) if own else name
    config = Config(
        model=model,
        data=DataConfig(tokenizer=stays_at),
        train=TrainConfig(sequence_length=model.max_positions or 1),
    )
    meta = Meta(
        run_id=uuid.uuid4().hex,
        layout={"pp": 1, "dp": 1, "cp": 1, "tp": 1, "chunks": 1},
        coordinates={"step": 0, "samples": 0, "updates": 0},
        config=flatten(config),
    )
    with atomic_folder(output) as folder:
        text = as_configuration(model, tokenizer=stays_at, load=output.absolute())
        (folder / CONFIGURATION).write_text(text)
        if own:
            save_tokenizer(loaded, name, folder / TOKENIZER, model.max_positions or 0)
            if (source.path / GENERATION).is_file():
                shutil.copyfile(source.path / GENERATION, folder / TOKENIZER / GENERATION)
        save(
            folder / OF_A_RUN,
            step=0,
            pieces=_pieces(source, report),
            meta=meta,
            group=SingleProcess(),
            shard_bytes=shard_bytes,
        )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _pieces(source: WeightSource, report: Callable[[str], None]) -> Iterator[Piece]:
    shapes, reported_s = source.shapes(), time.monotonic()
    for number, (name, shape) in enumerate(shapes.items(), 1):
        tensor = source.read(name)
        if tensor.dtype == torch.float16:
            tensor = tensor.float()
        yield Piece(name, shape, whole(shape), tensor)
        if time.monotonic() - reported_s > LINE_EVERY_S or number == len(shapes):
            reported_s = time.monotonic()
            report(f"{number:,} of {len(shapes):,} tensors")
