"""Rebalancing policy `balance`: expert replicas that take rows off the busiest rank (FlexMoE, Nie
et al., 2304.03946).

Each search step adds a replica of an expert of the busiest rank on another rank. The largest load
of a rank can grow before the next replica makes it smaller, for example if two ranks need a replica
each. So this is a beam search: it continues with the best few maps, not with one. At the end,
useless replicas are removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megapipe.experts.map import ExpertMap
from megapipe.experts.row_routing import TokensPerExpert, rows_on

WIDTH = 16
"""Beam width: maximum number of maps with which the search continues after each replica."""
PATIENCE = 2
"""Number of added replicas per rank that end the search if the largest load has not shrunk."""
EXPERTS = 6
"""Number of experts that a search step may replicate: those with most rows on the busiest rank."""

Holders = tuple[int, ...]


class _State(NamedTuple):
    """A state of the search: the ranks that hold each expert, and the load of each rank in rows."""

    order: list[int]
    """The loads in descending order. It is the first field, so states are sorted by it."""
    holders: tuple[Holders, ...]
    loads: list[int]


def balance(present: ExpertMap, counts: TokensPerExpert, node: int) -> ExpertMap:
    """Return a map with the owners of `present` and with replicas that make the largest load of a
    rank small. Replicas in `present` are ignored. `counts`: rows of each rank for each expert.
    `node`: number of ranks per node."""
    search = _Search(present, counts, node)
    holders = search.shrunk(search.expanded())
    return present.with_replicas(
        [
            [e for e, own in enumerate(holders) if rank in own and rank != present.owners[e]]
            for rank in range(present.ranks)
        ]
    )


class _Search:
    def __init__(self, present: ExpertMap, counts: TokensPerExpert, node: int) -> None:
        self._present, self._counts, self._node = present, counts, node
        self._known: dict[tuple[int, Holders], list[int]] = {}

    def expanded(self) -> _State:
        """Add replicas, and return the best state that the search has seen. Of equally good states
        it is the first one, which has the fewest replicas."""
        first = tuple((owner,) for owner in self._present.owners)
        columns = zip(*(self._rows(e, own) for e, own in enumerate(first)), strict=True)
        level = [_state(first, list(map(sum, columns)))]
        best, since = level[0], 0
        while level and since < PATIENCE * self._present.ranks:
            after = {state.holders: state for each in level for state in self._expansions(each)}
            level = sorted(after.values())[:WIDTH]
            since += 1
            if level and level[0].order[0] < best.order[0]:
                best, since = level[0], 0
        return best

    def shrunk(self, state: _State) -> tuple[Holders, ...]:
        """Remove replicas, those with the fewest rows first, unless that raises the largest load.
        Return the remaining holders."""
        owners = self._present.owners
        copies = [
            (self._rows(e, own)[rank], e, rank)
            for e, own in enumerate(state.holders)
            for rank in own
            if rank != owners[e]
        ]
        for _, expert, rank in sorted(copies):
            fewer = tuple(r for r in state.holders[expert] if r != rank)
            after = self._after(state, expert, fewer)
            if after.order[0] <= state.order[0]:
                state = after
        return state.holders

    def _expansions(self, state: _State) -> Iterator[_State]:
        """Yield the states with one more replica of an expert of the busiest rank."""
        most = state.loads.index(state.order[0])
        rows = {e: self._rows(e, own)[most] for e, own in enumerate(state.holders)}
        candidates = sorted((e for e in rows if rows[e]), key=lambda e: -rows[e])[:EXPERTS]
        each = self._present.experts // self._present.ranks
        had = [sum(rank in own for own in state.holders) for rank in range(self._present.ranks)]
        for rank, number in enumerate(had):
            if number - each == self._present.slots:
                continue
            for expert in candidates:
                own = state.holders[expert]
                if rank not in own:
                    yield self._after(state, expert, tuple(sorted((*own, rank))))

    def _after(self, state: _State, expert: int, holders: Holders) -> _State:
        """Return the state in which `expert` has the given holders."""
        old, new = self._rows(expert, state.holders[expert]), self._rows(expert, holders)
        loads = [load - a + b for load, a, b in zip(state.loads, old, new, strict=True)]
        before, behind = state.holders[:expert], state.holders[expert + 1 :]
        return _state((*before, holders, *behind), loads)

    def _rows(self, expert: int, holders: Holders) -> list[int]:
        """Return how many rows of `expert` each rank computes if `holders` hold it."""
        key = expert, holders
        if key not in self._known:
            self._known[key] = rows_on(holders, self._counts, expert, self._node)
        return self._known[key]


def _state(holders: tuple[Holders, ...], loads: list[int]) -> _State:
    return _State(sorted(loads, reverse=True), holders, loads)
