"""Ranks to which rows are dispatched under an expert map, and the number of rows on each rank."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.experts.map import ExpertMap

TokensPerExpert = Sequence[Sequence[int]]
"""Number of rows [rank][expert] that each rank dispatches to each expert."""


def evenly(totals: Sequence[int], ranks: int) -> list[list[int]]:
    """Split the row count of each expert evenly over ranks; the first ranks get the remainder."""
    return [[n // ranks + (rank < n % ranks) for n in totals] for rank in range(ranks)]


def totals_of(counts: TokensPerExpert) -> list[int]:
    """Sum the row counts of all ranks for each expert."""
    return list(map(sum, zip(*counts, strict=True)))


def destinations(holders: Sequence[int], ranks: int, node: int) -> list[int]:
    """Return, for each rank, the holder that computes the rank's rows of an expert: the rank itself
    if it holds the expert, else a holder on its node, else any holder. A node is `node` consecutive
    ranks. If there are several such holders, they are assigned round-robin."""
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
    """Count the rows of `expert` on each rank if `holders` hold it; a node has `node` ranks."""
    found = [0] * len(counts)
    for source, goal in enumerate(destinations(holders, len(counts), node)):
        found[goal] += counts[source][expert]
    return found


def tokens_per_rank(of: ExpertMap, counts: TokensPerExpert, node: int) -> list[int]:
    """Count the rows that each rank computes under a map; a node has `node` ranks."""
    each = (rows_on(of.holders(e), counts, e, node) for e in range(of.experts))
    return list(map(sum, zip(*each, strict=True)))
