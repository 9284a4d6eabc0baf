"""The loss over held-out samples, by forward programs alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megapipe.data.batch import Samples
from megapipe.train.feed import Rows

if TYPE_CHECKING:
    from megapipe.train.step import TrainStep

MICROBATCHES = 64
"""Most micro-batches of one program."""


class Evaluation(NamedTuple):
    """The result of validation."""

    loss: float
    """Mean over the unmasked tokens, in nats."""
    tokens: int
    """Unmasked tokens."""
    stopped: bool = False
    """Some rank was asked to stop before all samples were seen; the loss is nan."""


def evaluate(step: TrainStep, rows: Rows, samples: int, stop: Callable[[], bool]) -> Evaluation:
    """See :meth:`~megapipe.train.step.TrainStep.evaluate`."""

    def masked(indices: Sequence[int]) -> Samples:
        given = Samples(*rows(indices))
        inside = torch.tensor([i < samples for i in indices])
        return given._replace(mask=given.mask * inside.unsqueeze(1))

    per_microbatch = step.config.train.microbatch * step.layout.dp
    left = -(-samples // per_microbatch)
    first, total, tokens = 0, 0.0, 0
    with step.optimizer.true_weights():
        while left:
            m = min(left, MICROBATCHES)
            loss, own = step.run_forward(masked, first, m)
            sums = torch.tensor([loss, own, stop()], dtype=torch.float64)
            loss_sum, seen, stopped = step.mesh.ordered_sum(sums, "tp", "cp", "dp", "pp").tolist()
            total += loss_sum
            tokens += int(seen)
            if stopped:
                return Evaluation(math.nan, tokens, stopped=True)
            first += m * per_microbatch
            left -= m
    return Evaluation(total / max(tokens, 1), tokens)
