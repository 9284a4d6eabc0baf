"""Dropout whose mask is a function of coordinates."""

from __future__ import annotations

from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.layers.rng import seed_of, seeded


def dropout_seed(mb: MicroBatch, purpose: str, layer: int, tp_index: int) -> int:
    """Seed of a dropout mask.

    `tp_index` is 0 where every tp rank holds the same values and must drop the same ones.
    """
    within = (mb.first_row, mb.start) if mb.first_row or mb.start else ()
    return seed_of(mb.seed, purpose, mb.step, mb.index, layer, tp_index, *within)


def dropout(
    x: Tensor, p: float, mb: MicroBatch, purpose: str, layer: int, sharding: Sharding
) -> Tensor:
    """Dropout on [s(/tp), b, h], split by sequence or the same on all tp ranks."""
    if p == 0.0:
        return x
    tp_index = sharding.tp.index if sharding.sequence_split else 0
    with seeded(x.device, dropout_seed(mb, purpose, layer, tp_index)):
        return sharding.kernels.dropout(x, p)
