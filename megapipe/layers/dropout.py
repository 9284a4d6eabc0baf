"""Dropout whose mask depends only on the run seed, step, micro-batch, layer and tp rank."""

from __future__ import annotations

from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.layers.rng import seed_of, seeded


def dropout_seed(mb: MicroBatch, purpose: str, layer: int, tp_index: int) -> int:
    """Return the seed of a dropout mask.

    `tp_index` is 0 if all tp ranks hold equal values and must drop the same values.
    """
    within = (mb.first_row, mb.start) if mb.first_row or mb.start else ()
    return seed_of(mb.seed, purpose, mb.step, mb.index, layer, tp_index, *within)


def dropout(
    x: Tensor, p: float, mb: MicroBatch, purpose: str, layer: int, sharding: Sharding
) -> Tensor:
    """Apply dropout to x [s(/tp), b, h], which is split by sequence or equal on all tp ranks."""
    if p == 0.0:
        return x
    tp_index = sharding.tp.index if sharding.sequence_split else 0
    with seeded(x.device, dropout_seed(mb, purpose, layer, tp_index)):
        return sharding.kernels.dropout(x, p)
