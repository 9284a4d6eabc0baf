"""The loss of a batch from those of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.model.modules.stage import cross_entropy

Weigh = Callable[[int], float]
"""Samples of a micro-batch -> factor of its loss."""


class Objective:
    """The `loss` of a micro-batch, and the weights with which those of a step make the batch's: see
    :class:`~megapipe.library.pipeline.Pipeline`."""

    def __init__(
        self, loss: Callable[..., Tensor] | None, reduction: Literal["mean", "sum"]
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction={reduction!r}: expected mean or sum")
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss= is a {type(loss).__name__}: expected a function")
        self.loss = loss or _token_losses
        self._reduction = reduction
        self._of_tokens = loss is None

    def weights(self, targets: tuple[Tensor, ...], samples: int) -> Weigh:
        """The factors of the micro-batches' losses in a batch of `samples` samples."""
        if self._of_tokens:
            if len(targets) > 2:
                raise ConfigError(
                    f"batch: {len(targets)} targets for the cross-entropy of tokens: expected "
                    "labels, or labels and mask"
                )
            count = float(targets[1].sum()) if len(targets) == 2 else float(targets[0].numel())
            return lambda rows: 1 / count if count else 0.0
        if self._reduction == "sum":
            return lambda rows: 1.0
        return lambda rows: rows / samples


def _token_losses(logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum of the token losses that `mask` does not leave out, []."""
    return cross_entropy(logits, labels, torch.ones_like(labels) if mask is None else mask)
