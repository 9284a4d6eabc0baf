"""Checkpoints and Hugging Face folders of small models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megapipe.checkpoint import Checkpoint, Meta, Piece, SingleProcess, save, whole
from megapipe.cli import flatten
from megapipe.config.config import Config, TrainConfig
from megapipe.config.data import DataConfig
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig


def write_checkpoint(
    run: Path,
    model: ModelConfig,
    params: Mapping[str, Tensor],
    *,
    tokenizer: str = "byte",
    lora: LoraConfig | None = None,
) -> Checkpoint:
    """Write a run folder with a checkpoint of step 3 of a resolved model, without optimizer
    state."""
    config = Config(
        model=model,
        lora=lora or LoraConfig(),
        data=DataConfig(tokenizer=tokenizer),
        train=TrainConfig(sequence_length=model.max_positions or 1),
    )
    path = save(
        run / "checkpoints",
        step=3,
        pieces=[
            Piece(f"model/{n}", tuple(t.shape), whole(tuple(t.shape)), t) for n, t in params.items()
        ],
        meta=Meta(run_id="test", layout={}, coordinates={}, config=flatten(config)),
        group=SingleProcess(),
    )
    return Checkpoint.open(path)


def state_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the safetensors files in a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert equal names, types and bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name
