"""Models for inference whose weights are in memory instead of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.regions import Region
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import ParallelMesh
from megapipe.inference import Model, ModelInfo

BYTES = load_tokenizer("byte")


class HeldWeights:
    """Global tensors by name, with a checkpoint's interface for readers of weights."""

    path = Path("held")
    config: Mapping[str, Any] = {}

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self.params = params

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        assert {f"model/{n}": tuple(t.shape) for n, t in self.params.items()} == shapes

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        ends = zip(region.offsets, region.sizes, strict=True)
        out.copy_(self.params[name.removeprefix("model/")][tuple(slice(a, a + n) for a, n in ends)])


def held_model(
    model: ModelConfig,
    params: Mapping[str, Tensor],
    *,
    context: int,
    mesh: ParallelMesh | None = None,
    opening: tuple[int, ...] = (BYTES.eod,),
    **data: Any,
) -> Model:
    """Build a resolved model that reads bytes; `data` are keys of how its run has read texts."""
    source = ModelInfo(
        model=model,
        lora=None,
        tokenizer=BYTES,
        context=context,
        opening=opening,
        ends=frozenset({BYTES.eod}),
        data=DataConfig(**data),
    )
    return Model(source, HeldWeights(params), torch.device("cpu"), mesh)
