"""Shadows: replicas of the busiest experts on every rank (FasterMoE, He et al., PPoPP 2022).

Rows of a shadowed expert stay on their rank. Sending its weights to all ranks and its gradients
back takes the same time, however many rows it has. So shadows pay for experts with many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megapipe.experts.map import ExpertMap
from megapipe.experts.row_routing import TokensPerExpert, totals_of


class ShadowCosts(NamedTuple):
    """Costs that determine the number of shadows, in seconds."""

    row: float
    """Seconds to compute a row in the forward; the backward takes twice as long."""
    trip: float
    """Seconds to send a row to another rank; forward and backward send each row twice."""
    shadow: float
    """Seconds to send the weights of an expert to all other ranks, and its gradients back."""


def shadow(present: ExpertMap, counts: TokensPerExpert, times: ShadowCosts) -> ExpertMap:
    """Choose the i experts with the most rows as shadows, where i minimizes the time in seconds

        3 row B + 4 trip B + i shadow

    with the costs row, trip and shadow in `times`. Of several such i, the smallest is used. B is
    the number of rows of the busiest rank; rows of shadows do not count, as they are spread over
    all ranks. With one expert per rank, B is the number of rows of the expert with the
    (i + 1)-th most rows. A rank has at most as many replicas as slots.
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
    """List for each rank the shadows that it does not own."""
    return [[e for e in shadows if present.owners[e] != rank] for rank in range(present.ranks)]


def _fits(present: ExpertMap, shadows: Sequence[int]) -> bool:
    return max(map(len, _copies(present, shadows))) <= present.slots
