"""How the positions of a sequence are split over context-parallel ranks.

A context-parallel group is a grid, cp = ring x ulysses: ranks of a Ulysses group split heads during
attention (2309.14509). Each ring index has a block of positions. The ranks of a Ulysses group hold
equal parts of one block, in the order of their Ulysses indices.

==========  ==================================================================================
order       positions of ring index i of r
==========  ==================================================================================
zigzag      the i-th of 2r equal parts, and the i-th from the end: with causal attention every
            pair of blocks is the same work (Llama 3, 2407.21783)
striped     i, i + r, i + 2r, ... (2311.09431)
contiguous  the i-th of r equal parts
==========  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from megapipe.context.positions import Positions, StridedRange

Order = Literal["zigzag", "striped", "contiguous"]


class LocalPositions(NamedTuple):
    """Positions of one sequence that each rank holds. If the sequence has slices, positions of all
    slices are concatenated."""

    own: Positions
    """Positions of this rank's rows."""
    blocks: tuple[Positions, ...]
    """Positions of each ring index's block: the rows that its ranks have during attention, after
    the Ulysses all-to-all."""
    ranks: tuple[Positions, ...]
    """Positions of each context-parallel rank's rows."""


@dataclass(frozen=True)
class PositionSplit:
    """How a context-parallel group splits positions."""

    ring: int = 1
    ulysses: int = 1
    order: Order = "zigzag"
    heads_first: bool = True
    """Whether consecutive ranks form Ulysses groups, which split heads; else they form rings."""

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def multiple(self) -> int:
        """Divisor that a sequence length must have to be split evenly."""
        return self.cp * (2 if self.order == "zigzag" and self.ring > 1 else 1)

    def coordinates(self, index: int) -> tuple[int, int]:
        """Return the ring index and the Ulysses index of a context-parallel rank."""
        if self.heads_first:
            return divmod(index, self.ulysses)
        ulysses, ring = divmod(index, self.ring)
        return ring, ulysses

    def index(self, ring: int, ulysses: int) -> int:
        """Return the context-parallel rank with a ring index and a Ulysses index."""
        if self.heads_first:
            return ring * self.ulysses + ulysses
        return ulysses * self.ring + ring

    def block(self, first: int, length: int, ring: int) -> Positions:
        """Split positions first .. first + length - 1 over the ring; return the block of `ring`."""
        assert length % self.multiple == 0, f"{length} positions over {self}"
        n, size = self.ring, length // self.ring
        if self.order == "striped":
            return Positions((StridedRange(first + ring, size, n),))
        if self.order == "contiguous":
            return Positions((StridedRange(first + ring * size, size),))
        half = size // 2
        if n == 1:
            return Positions((StridedRange(first, size),))
        ends = (
            StridedRange(first + ring * half, half),
            StridedRange(first + (2 * n - 1 - ring) * half, half),
        )
        return Positions.of(ends)

    def own(self, first: int, length: int, index: int) -> Positions:
        """Return rank `index`'s share of positions first .. first + length - 1, split over all
        ranks."""
        ring, ulysses = self.coordinates(index)
        return self.block(first, length, ring).part(ulysses, self.ulysses)

    def local(self, lengths: Sequence[int], index: int) -> LocalPositions:
        """Return the positions of rank `index`, of each ring index and of all ranks, for a sequence
        of consecutive slices with these `lengths`. Each slice is split by itself."""
        starts = [0, *accumulate(lengths)]

        def joined(parts: Sequence[Positions]) -> Positions:
            return Positions(tuple(run for part in parts for run in part.runs))

        slices = list(zip(starts, lengths, strict=False))
        ranks = tuple(
            joined([self.own(first, length, each) for first, length in slices])
            for each in range(self.cp)
        )
        blocks = (
            joined([self.block(first, length, ring) for first, length in slices])
            for ring in range(self.ring)
        )
        return LocalPositions(ranks[index], tuple(blocks), ranks)
