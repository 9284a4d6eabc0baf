"""Checkpoints of small models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from megapipe.checkpoint import Meta, Piece, SingleProcess, save, whole
from megapipe.cli import flatten
from megapipe.config.config import Config
from megapipe.data.tokenizer import load_tokenizer
from megapipe.layout.resolve import resolve
from tests.parity import reference

CONTEXT = 8
TOKENIZER = load_tokenizer("byte")


def make_config(*, vocab: int = 260, document_mask: bool = False, **model: Any) -> Config:
    config = Config.model_validate(
        {
            "model": {
                "layers": 2,
                "hidden": 16,
                "vocab_size": vocab,
                "dropout": 0.5,
                "dtype": "fp64",
                **model,
            },
            "data": {"document_mask": document_mask},
            "train": {"sequence_length": CONTEXT},
        }
    )
    return resolve(config, 1, min(vocab, TOKENIZER.vocab_size))[0]


def write(folder: Path, config: Config, *, step: int = 7, seed: int = 3) -> dict[str, Tensor]:
    """Write a checkpoint of random weights under `folder` and return them."""
    model = config.model.model_copy(update={"dropout": 0.0})
    params = reference.init_random(model, seed=seed)
    pieces = [
        Piece(f"model/{name}", tuple(t.shape), whole(tuple(t.shape)), t)
        for name, t in params.items()
    ]
    meta = Meta(run_id="a", layout={}, coordinates={"step": step}, config=flatten(config))
    save(folder / "checkpoints", step=step, pieces=pieces, meta=meta, group=SingleProcess())
    return params
