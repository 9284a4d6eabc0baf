"""Chunks of experts: some of those of each rank, and how many rows there are for them.

Chunk i of a layer is the i-th part of the experts of each rank, so that a rank can compute with it
while the rows of the next one travel. An expert is in one chunk, so its products are the same as
without chunks. Copies (:mod:`megapipe.layers.moe.replicas`) are a chunk of their own, the last,
so that their weights may come late. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

TokensPerExpert = Sequence[Sequence[int]]
"""Rows that each rank of the group has for each of all experts, or of their places on ranks."""


@dataclass(frozen=True)
class ExpertChunk:
    """Some experts of each rank of an expert-parallel group, as one of the ranks sees them."""

    counts: TokensPerExpert
    of_each: int
    """Places of a rank, in all chunks: experts, and copies after them."""
    etp: int
    """Neighbours in the group with parts of the same experts."""
    experts: slice
    """Among the places of a rank."""
    token_rows: slice
    """Among the rows of the tokens here."""
    expert_rows: slice
    """Among the rows of the experts here."""
    ends: Sequence[int]
    """Of the rows of each of these experts, among those of the chunk."""

    def rows_between(self, source: int, member: int) -> int:
        """Rows of this chunk that one rank has for the experts of another."""
        first = self.of_each * (member // self.etp)
        return sum(self.counts[source][first + self.experts.start : first + self.experts.stop])


def fetched_chunks(counts: Sequence[int], ranks: int, number: int) -> list[ExpertChunk]:
    """The chunks of a layer whose experts, which so many ranks have the same number of, travel to
    the rows here: in each those of the first rank come first."""
    of_each = len(counts) // ranks
    found, start = [], 0
    for first, last in pairwise(edges(of_each, number)):
        own = [counts[of_each * rank + i] for rank in range(ranks) for i in range(first, last)]
        rows = slice(start, start + sum(own))
        part, ends = slice(first, last), list(accumulate(own))
        found.append(
            ExpertChunk(
                [counts], of_each, 1, experts=part, token_rows=rows, expert_rows=rows, ends=ends
            )
        )
        start = rows.stop
    return found


def dispatch_chunks(
    counts: TokensPerExpert, index: int, etp: int, number: int, copies: int = 0
) -> list[ExpertChunk]:
    """The chunks of a layer on the rank that is `index` in the group; so many places of each rank
    are for copies."""
    ranks = len(counts)
    of_each = len(counts[0]) * etp // ranks
    parts = range(ranks // etp)
    mine = of_each * (index // etp)
    found, own, here = [], 0, 0
    ends_of_copies = [of_each] if copies else []
    for first, last in pairwise([*edges(of_each - copies, number), *ends_of_copies]):
        sent = sum(sum(counts[index][of_each * p + first : of_each * p + last]) for p in parts)
        arriving = (source[mine + first : mine + last] for source in counts)
        ends = list(accumulate(map(sum, zip(*arriving, strict=True))))
        found.append(
            ExpertChunk(
                counts,
                of_each,
                etp,
                experts=slice(first, last),
                token_rows=slice(own, own + sent),
                expert_rows=slice(here, here + ends[-1]),
                ends=ends,
            )
        )
        own, here = found[-1].token_rows.stop, found[-1].expert_rows.stop
    return found


def edges(of_each: int, number: int) -> list[int]:
    """First experts of the chunks, among those of a rank, and the end."""
    return [-(-of_each * i // number) for i in range(number + 1)]
