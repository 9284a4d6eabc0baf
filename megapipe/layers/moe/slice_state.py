"""Routing state that the slices of a sequence share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapipe.layers.scratch import ScratchKey


@dataclass
class SliceRoutingState:
    """Routing sums of a layer and micro-batch over the slices so far, which come in ascending
    order.

    Later slices add to `counts` in place, so the first backward reads the counts of all slices. A
    scope is a set of tokens with one auxiliary loss (``model.moe.aux_loss_scope``).
    """

    counts: Tensor | None = None
    """[scopes, experts], int64: choices that the auxiliary loss counts."""
    score_sums: Tensor | None = None
    """[scopes, experts]: normalised scores, summed over the local tokens of each scope."""
    capacity_used: Tensor | None = None
    """[sequences, experts + 1], int64: choices that have asked for capacity, on all ranks; the last
    column counts choices that were already dropped."""


EARLIER = ScratchKey[SliceRoutingState]("earlier slices")
"""Key of the routing sums over the slices so far."""


def added(total: Tensor | None, new: Tensor) -> Tensor:
    """Return `total` with `new` added in place, or `new` if there is no total yet."""
    return new if total is None else total.add_(new)
