"""Models that are read tensor by tensor, whoever has written them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from megapipe.config.model import ModelConfig

CONFIG = "config.json"
"""A class' configuration, in a folder as transformers has it."""
KIND = "model/"
"""Beginning of the names that a checkpoint has for weights."""


class WeightSource(Protocol):
    """A model's configuration, and its global tensors by the names of checkpoints."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def model(self) -> ModelConfig:
        """The resolved model, in the type that holds all tensors without loss."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, ``model/...``."""

    def read(self, name: str) -> Tensor:
        """One of them, as a new host tensor. Raises CheckpointError."""
