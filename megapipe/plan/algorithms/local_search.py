"""Local search: states, moves between them, and a limited number of evaluations.

A state is any hashable value, and its cost the number to make small. States are evaluated by
:class:`Trials`, which remembers the best one, so a method of search only says which state comes
next. It can move to better states (:func:`descend`), sometimes to worse ones (:func:`anneal`), or
change one coordinate after the other (:func:`in_turn`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import nsmallest
from math import exp, inf
from random import Random
from typing import Generic, TypeVar

State = TypeVar("State", bound=Hashable)
Moves = Callable[[State], Iterable[State]]
"""Function that returns the states that one move leads to."""
WIDTH = 4
"""Number of states from which the next hop of a path of several moves begins."""
PATIENCE = 20
"""Number of starts without a new state after which a search ends."""


class Trials(Generic[State]):
    """States that a search has evaluated, with the best of them."""

    def __init__(self, cost: Callable[[State], float | None], limit: int) -> None:
        """Prepare a search.

        Args:
            cost: function that returns the cost of a state; None if the state is not allowed.
            limit: maximum number of states to evaluate. A state counts once.
        """
        self._cost, self._limit = cost, limit
        self._costs: dict[State, float] = {}
        self.best: State | None = None
        """State with the least cost so far; None if no state was allowed."""
        self.least = inf
        """Cost of the best state."""
        self.trace: list[float] = []
        """Least cost after each evaluation; it never rises."""

    @property
    def left(self) -> int:
        """Number of states that can still be evaluated."""
        return self._limit - len(self.trace)

    def __call__(self, state: State) -> float:
        """Return the cost of a state. It is infinite if the state is not allowed, and for a new
        state if none can be evaluated any more, so every search comes to its end."""
        if state not in self._costs:
            if not self.left:
                return inf
            cost = self._cost(state)
            self._costs[state] = inf if cost is None else cost
            if self._costs[state] < self.least:
                self.best, self.least = state, self._costs[state]
            self.trace.append(self.least)
        return self._costs[state]


def descend(trials: Trials[State], start: State, moves: Moves[State], hops: int = 1) -> State:
    """Move to better states until none is reached, and return the last one.

    Each step takes the first better state that is found. If one move leads to none, up to `hops`
    moves are made one after the other; of the states between them, the :data:`WIDTH` best ones
    are continued.
    """
    current: State | None = start
    while current is not None:
        start, current = current, _better(trials, current, moves, hops)
    return start


def _better(trials: Trials[State], start: State, moves: Moves[State], hops: int) -> State | None:
    """Return a state that is better than `start` and at most `hops` moves away; None if there is
    none."""
    limit, states, seen = trials(start), [start], {start}
    for _ in range(hops):
        reached: list[State] = []
        for state in states:
            for each in moves(state):
                if trials(each) < limit:
                    return each
                if each not in seen:
                    seen.add(each)
                    reached.append(each)
        states = nsmallest(WIDTH, reached, key=trials)
    return None


def anneal(
    trials: Trials[State],
    start: State,
    propose: Callable[[State], State],
    rng: Random,
    *,
    temperature: float,
    steps: int,
) -> State:
    """Walk by the Metropolis rule and return the last state.

    A state that is worse by `temperature` is accepted with probability 1 / e. The temperature
    stays the same, so the walk is a Markov chain whose states are the more frequent the less they
    cost.
    """
    current = start
    for _ in range(steps):
        proposed = propose(current)
        rise = trials(proposed) - trials(current)
        if rise <= 0 or (rise < inf and rng.random() < exp(-rise / temperature)):
            current = proposed
    return current


def in_turn(trials: Trials[State], start: State, coordinates: Sequence[Moves[State]]) -> State:
    """Change one coordinate after the other to its best value, until no change helps, and return
    the last state (coordinate descent).

    Args:
        trials: the search.
        start: first state.
        coordinates: for each coordinate the function that returns the states in which only this
            coordinate differs.
    """
    unchanged, turn = 0, 0
    while unchanged < len(coordinates):
        options = coordinates[turn % len(coordinates)](start)
        found = min(options, key=trials, default=start)
        unchanged, turn = unchanged + 1, turn + 1
        if trials(found) < trials(start):
            start, unchanged = found, 1
    return start


def from_starts(
    trials: Trials[State], starts: Iterable[State], improve: Callable[[State], State]
) -> None:
    """Improve one start after the other until no state can be evaluated any more, or until
    :data:`PATIENCE` starts in a row have led to no new state."""
    idle = 0
    for start in starts:
        before = trials.left
        improve(start)
        idle = idle + 1 if trials.left == before else 0
        if not trials.left or idle == PATIENCE:
            break
