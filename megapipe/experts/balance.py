"""Copies one by one, where they take most off the rank with most rows (FlexMoE, Nie et al.,
2304.03946).

An expert of that rank gets a copy on another one. A copy may make the largest load larger before
the next makes it smaller, as when two ranks need a copy each, so not one map but the best few with
as many copies go on. In the end copies go that no rank needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megapipe.experts.map import ExpertMap
from megapipe.experts.rows import TokensPerExpert, rows_on

WIDTH = 16
"""Maps with as many copies that go on."""
PATIENCE = 2
"""By the number of ranks, copies after which none has made the largest load smaller."""
EXPERTS = 6
"""Those with most rows on a rank, which may get a copy elsewhere."""

Holders = tuple[int, ...]


class _State(NamedTuple):
    """Holders of each expert, with the load of each rank."""

    order: list[int]
    """The loads, the largest first: it is compared by these, then by what follows."""
    holders: tuple[Holders, ...]
    loads: list[int]


def balance(present: ExpertMap, counts: TokensPerExpert, node: int) -> ExpertMap:
    """The present owners, with copies by which the largest load gets small; it does not matter what
    copies there were."""
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
        """The best map of all that are met, of equal ones the first, with the fewest copies."""
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
        """Without copies whose rows other holders can take with no larger largest load; those with
        the fewest rows are asked first."""
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
        """All with one copy more, of an expert of the rank with most rows."""
        most = state.loads.index(state.order[0])
        rows = {e: self._rows(e, own)[most] for e, own in enumerate(state.holders)}
        there = sorted((e for e in rows if rows[e]), key=lambda e: -rows[e])[:EXPERTS]
        each = self._present.experts // self._present.ranks
        had = [sum(rank in own for own in state.holders) for rank in range(self._present.ranks)]
        for rank, number in enumerate(had):
            if number - each == self._present.slots:
                continue
            for expert in there:
                own = state.holders[expert]
                if rank not in own:
                    yield self._after(state, expert, tuple(sorted((*own, rank))))

    def _after(self, state: _State, expert: int, holders: Holders) -> _State:
        """With other holders of an expert."""
        old, new = self._rows(expert, state.holders[expert]), self._rows(expert, holders)
        loads = [load - a + b for load, a, b in zip(state.loads, old, new, strict=True)]
        before, behind = state.holders[:expert], state.holders[expert + 1 :]
        return _state((*before, holders, *behind), loads)

    def _rows(self, expert: int, holders: Holders) -> list[int]:
        """Rows of an expert on each rank."""
        key = expert, holders
        if key not in self._known:
            self._known[key] = rows_on(holders, self._counts, expert, self._node)
        return self._known[key]


def _state(holders: tuple[Holders, ...], loads: list[int]) -> _State:
    return _State(sorted(loads, reverse=True), holders, loads)
