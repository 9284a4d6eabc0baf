"""Shadows: copies of the experts with most rows on every rank (FasterMoE, He et al., PPoPP 2022).

Rows of such an expert stay where they are. A copy and its gradient take their time once a step,
whatever the rows, so it is worth it for experts that many tokens choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megapipe.experts.map import ExpertMap
from megapipe.experts.rows import TokensPerExpert, totals_of


class ShadowCosts(NamedTuple):
    """Seconds by which shadows are judged."""

    row: float
    """To compute a row forward; backward takes twice as long."""
    trip: float
    """Of a row to another rank; forward and backward there are two each."""
    shadow: float
    """To send copies of an expert to all other ranks, and their gradients back."""


def shadow(present: ExpertMap, counts: TokensPerExpert, times: ShadowCosts) -> ExpertMap:
    """Shadows of the first i experts, in the order of their rows, with the i for which

        3 row B + 4 trip B + i shadow

    is least, the smallest of equal ones. B are the rows of the rank with most of them, without
    those of shadows, which every rank computes a part of; with one expert on each rank B is that of
    expert i + 1. A rank has no more copies than slots.
    """
    totals = totals_of(counts)
    order = sorted(range(present.experts), key=lambda expert: (-totals[expert], expert))
    choices = [i for i in range(len(order) + 1) if _fits(present, order[:i])]

    def seconds(i: int) -> float:
        rows = [0] * present.ranks
        for expert in order[i:]:
            rows[present.owners[expert]] += totals[expert]
        return (3 * times.row + 4 * times.trip) * max(rows) + i * times.shadow

    best = min(choices, key=seconds)
    return present.with_replicas(_copies(present, order[:best]))


def _copies(present: ExpertMap, shadows: Sequence[int]) -> list[list[int]]:
    """Of each rank, all shadows but its own experts."""
    return [[e for e in shadows if present.owners[e] != rank] for rank in range(present.ranks)]


def _fits(present: ExpertMap, shadows: Sequence[int]) -> bool:
    return max(map(len, _copies(present, shadows))) <= present.slots
