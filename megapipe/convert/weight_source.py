"""Interface of stored models, of any format, that are read tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor

from megapipe.config.model import ModelConfig

CONFIG = "config.json"
"""File name of a class's configuration in a transformers folder."""
KIND = "model/"
"""Prefix of the names of weights in a checkpoint."""


class WeightSource(Protocol):
    """A model's configuration, and its global tensors by their names in checkpoints."""

    @property
    def path(self) -> Path:
        """The folder of the model."""

    @property
    def model(self) -> ModelConfig:
        """Resolved model, with a type that holds the values of all tensors without loss."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors by name, ``model/...``."""

    def read(self, name: str) -> Tensor:
        """Return a tensor as a new host tensor. Raises CheckpointError."""
