"""Which ranks have the other tokens of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, all_reduce


@dataclass(frozen=True)
class TokenShards:
    """The ranks that have equal parts of each sequence of a micro-batch, by default this one alone.
    Their parts follow each other in the order of the ranks."""

    axis: Axis = field(default_factory=Axis.alone)

    def gather(self, own: Tensor) -> Tensor:
        """[s/n, b, k] of the tokens here -> [s, b, k] of whole sequences, position by position.
        They travel as bytes: libraries know few types of whole numbers."""
        return all_gather(own.contiguous().view(torch.uint8), self.axis).view(own.dtype)

    def own(self, whole: Tensor) -> Tensor:
        """[s, ...] -> [s/n, ...]: the part of this rank's tokens."""
        return whole.chunk(self.axis.size)[self.axis.index]

    def add_up(self, counts: Tensor) -> Tensor:
        """Sums of the numbers of all of these ranks, in place."""
        return all_reduce(counts, self.axis)
