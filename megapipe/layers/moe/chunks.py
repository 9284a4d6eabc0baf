"""Expert chunks: parts of each rank's experts, computed one after the other, and their row counts.

Expert chunk i of a layer is the i-th part of every rank's experts: a rank computes it while the
rows of expert chunk i + 1 are in flight. An expert is in one chunk, so its products are the same as
without chunks. Replicas (:mod:`megapipe.layers.moe.replicas`) are the last chunk, so that their
weights may arrive late. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

TokensPerExpert = Sequence[Sequence[int]]
"""Row counts [rank][expert or slot]: how many rows of a rank's tokens an expert or slot gets."""


@dataclass(frozen=True)
class ExpertChunk:
    """One expert chunk of an expert-parallel group, as seen by one rank of the group."""

    counts: TokensPerExpert
    of_each: int
    """Number of slots of a rank (its experts, then its replicas) in all expert chunks together."""
    etp: int
    """Number of adjacent ranks of the group that share one expert."""
    experts: slice
    """Range of this chunk's slots among the slots of a rank."""
    token_rows: slice
    """Range of this chunk's rows among the rows of the local tokens."""
    expert_rows: slice
    """Range of this chunk's rows among the rows of the local experts."""
    ends: Sequence[int]
    """Cumulative number of rows per expert of this chunk."""

    def rows_between(self, source: int, member: int) -> int:
        """Return how many of this chunk's rows rank `source` sends to experts of rank `member`."""
        first = self.of_each * (member // self.etp)
        return sum(self.counts[source][first + self.experts.start : first + self.experts.stop])


def fetched_chunks(counts: Sequence[int], ranks: int, number: int) -> list[ExpertChunk]:
    """Split the experts into `number` expert chunks whose weights are fetched. `counts` has the
    local rows per expert; each of `ranks` ranks has the same number of experts. In a chunk, experts
    are in the order of their ranks."""
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
    """Split the experts into `number` expert chunks, as seen by rank `index` of the expert-parallel
    group. If each rank has `copies` slots for replicas, these are an additional last chunk."""
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
    """Split a rank's `of_each` experts into `number` chunks; return the index of each chunk's first
    expert, then `of_each`."""
    return [-(-of_each * i // number) for i in range(number + 1)]
