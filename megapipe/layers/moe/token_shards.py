"""Which ranks have the other tokens of the same sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe.context.split import LocalPositions
from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, all_reduce


@dataclass(frozen=True)
class TokenShards:
    """The ranks with equal parts of each sequence of a micro-batch, by default this one alone."""

    axis: Axis = field(default_factory=Axis.alone)
    positions: Tensor | None = None
    """[s]: those of the first rank's tokens, then of the second's, ...; None: they ascend."""
    earlier_positions: int = 0
    """Positions of the sequence in earlier slices."""
    whole: int | None = None
    """Positions of the whole sequence, of which these are a slice; None: of all of it."""

    @classmethod
    def of(
        cls,
        axis: Axis,
        here: int,
        device: torch.device,
        *,
        held: LocalPositions | None,
        start: int,
        whole: int | None,
    ) -> TokenShards:
        """Describe the ranks of `axis`, of which this one has `here` tokens of each sequence.

        The positions here are `held`, begin at `start`, and are `whole` in all slices together.
        """
        if held is None:
            return cls(axis, None, start, whole)
        cp = len(held.ranks)
        stop = start + here * axis.size // cp
        runs = [run for each in held.ranks for run in each.rows(start, stop).runs]
        parts = [torch.arange(r.first, r.last + 1, r.step, device=device) for r in runs]
        length = None if whole is None else whole * cp
        return cls(axis, torch.cat(parts), start * cp, length)

    def length(self, here: int) -> int:
        """Positions of a whole sequence, of which each rank has `here` now."""
        return here * self.axis.size if self.whole is None else self.whole

    def ends(self, here: int) -> bool:
        """Whether these tokens are the last of their sequences."""
        return self.earlier_positions + here * self.axis.size == self.length(here)

    def gather(self, own: Tensor) -> Tensor:
        """[s/n, b, k] of the tokens here -> [s, b, k] of those of all ranks, position by position.
        They travel as bytes: libraries know few types of whole numbers."""
        whole = all_gather(own.contiguous().view(torch.uint8), self.axis).view(own.dtype)
        return whole if self.positions is None else whole[self.positions.argsort()]

    def own_positions(self, here: int, device: torch.device) -> Tensor:
        """[here]: the positions of this rank's tokens, of which each sequence has so many."""
        if self.positions is None:
            return torch.arange(here, device=device) + (
                self.earlier_positions + here * self.axis.index
            )
        return self.positions.chunk(self.axis.size)[self.axis.index]

    def local_part(self, whole: Tensor) -> Tensor:
        """[s, b, k] -> [s/n, b, k]: the part of this rank's tokens."""
        if self.positions is None:
            return whole.chunk(self.axis.size)[self.axis.index]
        return whole[self.positions.chunk(self.axis.size)[self.axis.index] - self.earlier_positions]

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Sums of the numbers of all of these ranks, in place."""
        return all_reduce(counts, self.axis)
