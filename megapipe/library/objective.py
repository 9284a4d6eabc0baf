"""The loss of a batch, composed of the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.model.modules.stage import cross_entropy

Weigh = Callable[[int], float]
"""Function from a micro-batch's number of samples to the factor of its loss."""


class Objective:
    """Loss function of a micro-batch, and the factors with which a step's micro-batch losses add up
    to the loss of the whole batch."""

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
        """Return the function that weighs the micro-batches' losses, for a batch of `samples`
        samples."""
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
    """Return the sum of the token losses that `mask` selects, []."""
    return cross_entropy(logits, labels, torch.ones_like(labels) if mask is None else mask)
