"""Enumeration with a bound: look at all candidates, except those that cannot be the best.

:func:`cheapest` evaluates candidates in the order of a lower bound. :func:`best_choices` makes one
choice after the other and leaves a branch as soon as its bound is too high. :class:`Front` keeps
what no other candidate beats, if there are several costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop
from math import inf
from typing import Generic, NamedTuple, TypeVar

Candidate = TypeVar("Candidate")
Choice = TypeVar("Choice")


class Cheapest(NamedTuple, Generic[Candidate]):
    """Result of an enumeration."""

    candidate: Candidate
    cost: float
    evaluated: int
    """Number of candidates whose costs were computed; the bound excluded all others."""


def cheapest(
    candidates: Iterable[Candidate],
    bound: Callable[[Candidate], float],
    cost: Callable[[Candidate], float | None],
) -> Cheapest[Candidate] | None:
    """Return the candidate with the least cost; None if no candidate is allowed.

    Args:
        candidates: all candidates; of equally good ones, the one with the least bound is returned.
        bound: function that returns a lower bound of a candidate's cost.
        cost: function that returns the cost of a candidate; None if it is not allowed.
    """
    queue = [(bound(each), number, each) for number, each in enumerate(candidates)]
    heapify(queue)
    found: Cheapest[Candidate] | None = None
    evaluated = 0
    while queue:
        least, _, candidate = heappop(queue)
        if found is not None and least >= found.cost:
            break
        evaluated += 1
        value = cost(candidate)
        if value is not None and (found is None or value < found.cost):
            found = Cheapest(candidate, value, evaluated)
    return found and found._replace(evaluated=evaluated)


def best_choices(
    options: Sequence[Sequence[Choice]],
    cost: Callable[[tuple[Choice, ...]], float],
    rest: Sequence[float] | None = None,
) -> tuple[float, tuple[Choice, ...]]:
    """Make one choice after the other, and return the least cost and the choices (branch and
    bound, depth first).

    Args:
        options: what can be chosen, for each choice.
        cost: function that returns the cost of the first choices. A further choice may not lower
            it. An infinite cost excludes a branch.
        rest: lower bounds: rest[i] is what the choices from number i on add at least. Default: 0.

    Returns:
        An infinite cost and no choices if every branch is excluded.
    """
    least = [*(rest or [0.0] * len(options)), 0.0]
    best: tuple[float, tuple[Choice, ...]] = (inf, ())

    def visit(chosen: tuple[Choice, ...], spent: float) -> None:
        nonlocal best
        if spent + least[len(chosen)] >= best[0]:
            return
        if len(chosen) == len(options):
            best = (spent, chosen)
            return
        branches = [(*chosen, option) for option in options[len(chosen)]]
        costs = [cost(each) for each in branches]
        for index in sorted(range(len(branches)), key=costs.__getitem__):
            visit(branches[index], costs[index])

    visit((), 0.0)
    return best


class Front(Generic[Candidate]):
    """Candidates that are not dominated: none of the others has costs that are all as low."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[float, ...], Candidate]] = []

    def add(self, costs: tuple[float, ...], candidate: Candidate) -> None:
        """Add a candidate unless a kept one dominates it, and drop those that it dominates."""
        if not any(_no_worse(own, costs) for own, _ in self._kept):
            self._kept = [each for each in self._kept if not _no_worse(costs, each[0])]
            self._kept.append((costs, candidate))

    def __iter__(self) -> Iterator[Candidate]:
        return (candidate for _, candidate in self._kept)

    def points(self) -> list[tuple[tuple[float, ...], Candidate]]:
        """Return the candidates with their costs, sorted by the first cost."""
        return sorted(self._kept, key=lambda each: each[0])


def _no_worse(costs: tuple[float, ...], than: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(costs, than, strict=True))
