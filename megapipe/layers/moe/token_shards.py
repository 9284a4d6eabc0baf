"""Ranks that hold parts of the same sequences, for capacity and counts over whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapipe.context.split import LocalPositions
from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, all_reduce


@dataclass(frozen=True)
class TokenShards:
    """Ranks with equal parts of each sequence of a micro-batch, by default only this rank."""

    axis: Axis = field(default_factory=Axis.alone)
    positions: Tensor | None = None
    """[s]: positions of the first rank's tokens, then the second's, ...; None: ascending."""
    earlier_positions: int = 0
    """Number of positions of the sequence in earlier slices."""
    whole: int | None = None
    """Length of the whole sequence if the tokens are a slice; None: the sequence has no slices."""

    @classmethod
    def of(
        cls,
        axis: Axis,
        here: int,
        device: torch.device,
        *,
        local_positions: LocalPositions | None,
        start: int,
        whole: int | None,
    ) -> TokenShards:
        """Describe the ranks of `axis`; this rank has `here` tokens of each sequence.

        `local_positions` has the positions of the context-parallel ranks; None without them. If the
        tokens are a slice, it begins at local position `start`, and `whole` is the number of local
        positions of the whole sequence.
        """
        if local_positions is None:
            return cls(axis, None, start, whole)
        cp = len(local_positions.ranks)
        stop = start + here * axis.size // cp
        runs = [run for each in local_positions.ranks for run in each.rows(start, stop).runs]
        parts = [torch.arange(r.first, r.last + 1, r.step, device=device) for r in runs]
        length = None if whole is None else whole * cp
        return cls(axis, torch.cat(parts), start * cp, length)

    def length(self, here: int) -> int:
        """Return the length of a whole sequence; each rank has `here` positions of the current
        slice or sequence."""
        return here * self.axis.size if self.whole is None else self.whole

    def ends(self, here: int) -> bool:
        """Whether these tokens are the last of their sequences."""
        return self.earlier_positions + here * self.axis.size == self.length(here)

    def gather(self, own: Tensor) -> Tensor:
        """Gather values of local tokens [s/n, b, k] into those of all ranks' tokens [s, b, k],
        ordered by position. Values are sent as bytes, since libraries support few integer types."""
        whole = all_gather(own.contiguous().view(torch.uint8), self.axis).view(own.dtype)
        return whole if self.positions is None else whole[self.positions.argsort()]

    def own_positions(self, here: int, device: torch.device) -> Tensor:
        """Return [here]: the positions of this rank's `here` tokens of each sequence."""
        if self.positions is None:
            return torch.arange(here, device=device) + (
                self.earlier_positions + here * self.axis.index
            )
        return self.positions.chunk(self.axis.size)[self.axis.index]

    def local_part(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens: [s, b, k] -> [s/n, b, k]."""
        if self.positions is None:
            return whole.chunk(self.axis.size)[self.axis.index]
        return whole[self.positions.chunk(self.axis.size)[self.axis.index] - self.earlier_positions]

    def all_reduce(self, counts: Tensor) -> Tensor:
        """Sum the counts over these ranks, in place."""
        return all_reduce(counts, self.axis)
