"""To which ranks rows go under a map, and how many that are."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.experts.map import ExpertMap

TokensPerExpert = Sequence[Sequence[int]]
"""Rows that each rank has for each expert."""


def evenly(totals: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows for each expert as if every rank had as many of them; what is left over goes to the
    first ones."""
    return [[n // ranks + (rank < n % ranks) for n in totals] for rank in range(ranks)]


def totals_of(counts: TokensPerExpert) -> list[int]:
    """Rows for each expert."""
    return list(map(sum, zip(*counts, strict=True)))


def destinations(holders: Sequence[int], ranks: int, node: int) -> list[int]:
    """For each rank the holder of an expert to which its rows for it go: itself; else a holder of
    its own node, of `node` neighbouring ranks; else any. Where there are several of these, they are
    dealt to the ranks one after the other."""
    found = list(range(ranks))
    left: list[int] = []
    for first in range(0, ranks, node):
        here = range(first, min(first + node, ranks))
        others = [rank for rank in here if rank not in holders]
        near = [rank for rank in holders if rank in here]
        if near:
            _deal(others, near, found)
        else:
            left += others
    _deal(left, holders, found)
    return found


def _deal(sources: Sequence[int], holders: Sequence[int], found: list[int]) -> None:
    for number, source in enumerate(sources):
        found[source] = holders[number % len(holders)]


def rows_on(holders: Sequence[int], counts: TokensPerExpert, expert: int, node: int) -> list[int]:
    """Rows of an expert that each rank computes."""
    found = [0] * len(counts)
    for source, goal in enumerate(destinations(holders, len(counts), node)):
        found[goal] += counts[source][expert]
    return found


def tokens_per_rank(of: ExpertMap, counts: TokensPerExpert, node: int) -> list[int]:
    """Rows that each rank computes."""
    each = (rows_on(of.holders(e), counts, e, node) for e in range(of.experts))
    return list(map(sum, zip(*each, strict=True)))
