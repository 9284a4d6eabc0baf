"""Slices of a sequence hand on to each other how its tokens have chosen experts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megapipe.layers.scratch import ScratchKey


@dataclass
class SliceRoutingState:
    """Of a layer and the sequences of a micro-batch: sums over the slices so far, which come in
    ascending order.

    The counts of all slices are known when the first backward comes, which reads the same tensor.
    """

    counts: Tensor | None = None
    """[scopes, experts], int64: choices that the balance term counts."""
    score_sums: Tensor | None = None
    """[scopes, experts]: scores that sum to 1, of the tokens here."""
    capacity_used: Tensor | None = None
    """[sequences, experts + 1], int64: choices that have asked for a place, on all ranks; the last
    column is of those that were dropped before."""


EARLIER = ScratchKey[SliceRoutingState]("earlier slices")
"""Sums over the slices so far."""


def added(total: Tensor | None, new: Tensor) -> Tensor:
    """`total`, to which `new` is added in place, or `new` where there is none yet."""
    return new if total is None else total.add_(new)
