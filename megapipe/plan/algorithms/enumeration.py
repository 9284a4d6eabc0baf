"""Enumeration with a bound: look at all candidates, except those that cannot be the best.

Three functions leave candidates out. Candidates are evaluated in the order of a lower bound, until
the bound exceeds the best cost (:func:`cheapest`). Of several costs, a candidate is dropped if
another one beats it in all (:class:`Front`). If there are several choices to make, this is done
after each of them (:func:`best_choices`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop
from typing import Generic, NamedTuple, TypeVar

Candidate = TypeVar("Candidate")
Choice = TypeVar("Choice")
Costs = tuple[float, ...]
EQUAL = 1e-9
"""Relative difference below which costs count as equal: the rest of a sum in another order."""


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


class Front(Generic[Candidate]):
    """Candidates that are not dominated: none of the others has costs that are all as low."""

    def __init__(self, entries: Iterable[tuple[Costs, Candidate]] = ()) -> None:
        self._kept: list[tuple[Costs, Candidate]] = []
        for costs, candidate in entries:
            self.add(costs, candidate)

    def add(self, costs: Costs, candidate: Candidate) -> None:
        """Add a candidate unless a kept one dominates it, and drop those that it dominates."""
        first = costs[0]
        end = bisect_right(self._kept, first * (1 + EQUAL), key=_first)
        if any(_no_worse(self._kept[index][0], costs) for index in range(end)):
            return
        start = bisect_left(self._kept, first * (1 - EQUAL), key=_first)
        later = [each for each in self._kept[start:] if not _no_worse(costs, each[0])]
        place = start + bisect_left(later, first, key=_first)
        self._kept[start:] = later
        self._kept.insert(place, (costs, candidate))

    def __iter__(self) -> Iterator[tuple[Costs, Candidate]]:
        """Yield the candidates with their costs, by the first cost."""
        return iter(self._kept)

    def thinned(self, limit: int) -> Front[Candidate]:
        """Return a front of at most `limit` candidates, spread evenly over this one; it has the
        first candidate, and the last one of the least sum of all further costs."""
        kept = self._kept
        if len(kept) <= limit:
            return self
        spread = [kept[index * len(kept) // (limit - 1)] for index in range(limit - 1)]
        return Front([*spread, min(reversed(kept), key=lambda entry: sum(entry[0][1:]))])


def best_choices(
    options: Sequence[Sequence[Choice]],
    extend: Callable[[Costs, tuple[Choice, ...]], Costs | None],
    state: Callable[[tuple[Choice, ...]], Hashable],
    start: Costs = (0.0,),
    limit: int | None = None,
) -> Front[tuple[Choice, ...]]:
    """Make one choice after the other, and return all results that are not dominated.

    Args:
        options: what can be chosen, for each choice.
        extend: function of the costs so far and of the choices with one more, that returns the
            costs with it; None if it is not allowed. Costs may only rise.
        state: function that returns what the costs of further choices depend on. Of beginnings
            with the same state, only those that are not dominated are continued.
        start: costs before any choice.
        limit: maximum number of beginnings with the same state that are continued
            (:meth:`Front.thinned`). Results are approximate if more are not dominated.
    """
    fronts: dict[Hashable, Front[tuple[Choice, ...]]] = {state(()): Front([(start, ())])}
    for own in options:
        following: dict[Hashable, Front[tuple[Choice, ...]]] = {}
        for front in fronts.values():
            for costs, chosen in front:
                for option in own:
                    longer = (*chosen, option)
                    if (after := extend(costs, longer)) is not None:
                        following.setdefault(state(longer), Front()).add(after, longer)
        fronts = following
        if limit is not None:
            fronts = {key: front.thinned(limit) for key, front in following.items()}
    return Front(entry for front in fronts.values() for entry in front)


def _first(entry: tuple[Costs, Candidate]) -> float:
    return entry[0][0]


def _no_worse(costs: Costs, than: Costs) -> bool:
    return all(a <= b + EQUAL * abs(b) for a, b in zip(costs, than, strict=True))
