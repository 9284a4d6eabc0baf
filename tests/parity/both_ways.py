"""Runs with random weights, and Hugging Face folders with the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.convert import export
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.model.transformers_models import model_of

MODEL = model_of("llama_gqa").model_copy(update={"dtype": "fp32", "vocab_size": 257, "layers": 2})


def write_run(folder: Path, case: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Write a run with random weights in ``run``; return its model and its parameters."""
    model = model_of(case).model_copy(update={"dtype": "fp32", "vocab_size": 259})
    params = init_random(model, seed=5, dtype=torch.float32)
    write_checkpoint(folder / "run", model, params)
    return model, params


def write_both_ways(folder: Path) -> Path:
    """Write a run, and the same model as a Hugging Face folder of two shards; return `folder`."""
    checkpoint = write_checkpoint(
        folder / "run", MODEL, init_random(MODEL, seed=5, dtype=torch.float32)
    )
    export(checkpoint, folder / "hf", shard_bytes=50_000)
    assert len(list((folder / "hf").glob("*.safetensors"))) == 2
    return folder


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
