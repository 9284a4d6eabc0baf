"""How the positions of a sequence are split over context-parallel ranks.

The ranks of a context-parallel group form a ring times a group that splits heads while attending
(Ulysses, 2309.14509): cp = ring x ulysses. A member of the ring holds a block of positions, of
which each Ulysses index has an equal part, so that joining the parts gives the block.

==========  ==================================================================================
order       positions of ring index i of r, of a sequence of s
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
    """The positions of a sequence, or of all its slices one after the other."""

    own: Positions
    """Of this rank's rows."""
    blocks: tuple[Positions, ...]
    """Of the rows of each member of the ring, while attending."""
    ranks: tuple[Positions, ...]
    """Of the rows of each context-parallel index."""


@dataclass(frozen=True)
class PositionSplit:
    """A context-parallel group and what each of its ranks holds."""

    ring: int = 1
    ulysses: int = 1
    order: Order = "zigzag"
    heads_first: bool = True
    """Whether ranks that split heads are neighbours, or else those of a ring."""

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def multiple(self) -> int:
        """A length is split evenly if this divides it."""
        return self.cp * (2 if self.order == "zigzag" and self.ring > 1 else 1)

    def place(self, index: int) -> tuple[int, int]:
        """Index in the ring and among the ranks that split heads, of a context-parallel index."""
        if self.heads_first:
            return divmod(index, self.ulysses)
        ulysses, ring = divmod(index, self.ring)
        return ring, ulysses

    def index(self, ring: int, ulysses: int) -> int:
        """The context-parallel index of such a place."""
        if self.heads_first:
            return ring * self.ulysses + ulysses
        return ulysses * self.ring + ring

    def block(self, first: int, length: int, ring: int) -> Positions:
        """The part of a member of the ring of positions first .. first + length - 1."""
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
        """The part of a context-parallel rank of them."""
        ring, ulysses = self.place(index)
        return self.block(first, length, ring).part(ulysses, self.ulysses)

    def local(self, lengths: Sequence[int], index: int) -> LocalPositions:
        """The parts of a rank, and of the members of its ring, of slices of these lengths, each of
        which is split by itself."""
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
