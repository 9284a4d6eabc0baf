"""The map of a layer's experts: the rank that owns each, and the ranks that have copies.

A rank owns as many experts as the others: it has their weights, masters and states, and updates
them. It may have copies of experts that others own, each in one of its slots, to compute rows that
would have to travel otherwise. Whoever has an expert is a holder of it. Ranks are the ep ones: of
etp neighbours, which have parts of the same experts, all are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.errors import ConfigError
from megapipe.words import count_noun


@dataclass(frozen=True)
class ExpertMap:
    """Owners and copies of the experts of a layer. Raises :class:`ConfigError`."""

    owners: tuple[int, ...]
    """By expert."""
    replicas: tuple[tuple[int, ...], ...]
    """By rank the experts of others that it has copies of, in ascending order."""
    slots: int = 0
    """The most copies that a rank has room for."""

    def __post_init__(self) -> None:
        experts, ranks = len(self.owners), len(self.replicas)
        if not ranks or not experts or experts % ranks:
            raise ConfigError(
                f"{count_noun(experts, 'expert')} over {count_noun(ranks, 'rank')}: "
                "expected as many for each rank"
            )
        for expert, owner in enumerate(self.owners):
            if not 0 <= owner < ranks:
                raise ConfigError(
                    f"owner {owner} of expert {expert}: expected a rank from 0 to {ranks - 1}"
                )
        for rank, copies in enumerate(self.replicas):
            self._check(rank, copies)

    def _check(self, rank: int, copies: tuple[int, ...]) -> None:
        experts, each = len(self.owners), len(self.owners) // len(self.replicas)
        own = self.owners.count(rank)
        if own != each:
            raise ConfigError(
                f"rank {rank} owns {count_noun(own, 'expert')}: expected {each}, as all"
            )
        if list(copies) != sorted(set(copies)):
            raise ConfigError(f"copies {list(copies)} of rank {rank}: expected each once, in order")
        if len(copies) > self.slots:
            raise ConfigError(
                f"rank {rank} has {len(copies)} copies: expected at most {self.slots}, its slots"
            )
        for expert in copies:
            if not 0 <= expert < experts:
                raise ConfigError(
                    f"copy of expert {expert} on rank {rank}: expected one from 0 to {experts - 1}"
                )
            if self.owners[expert] == rank:
                raise ConfigError(f"rank {rank} has a copy of expert {expert}, which it owns")

    @classmethod
    def even(cls, experts: int, ranks: int, slots: int = 0) -> ExpertMap:
        """Neighbouring experts on each rank, and no copies: as a run begins."""
        each = max(1, experts // ranks)
        return cls(tuple(e // each for e in range(experts)), ((),) * ranks, slots)

    @classmethod
    def stored(cls, value: Any) -> ExpertMap:
        """The map of a dictionary, as JSON has it. Raises :class:`ConfigError`."""
        if not (
            isinstance(value, dict)
            and value.keys() == {"owners", "copies", "slots"}
            and _whole(value["owners"])
            and isinstance(value["copies"], list)
            and all(map(_whole, value["copies"]))
            and _whole([value["slots"]])
        ):
            raise ConfigError('expected {"owners": [..], "copies": [[..], ..], "slots": N}')
        return cls(tuple(value["owners"]), tuple(map(tuple, value["copies"])), value["slots"])

    def plain(self) -> dict[str, Any]:
        """The dictionary that :meth:`stored` reads."""
        copies = list(map(list, self.replicas))
        return {"owners": list(self.owners), "copies": copies, "slots": self.slots}

    @property
    def experts(self) -> int:
        return len(self.owners)

    @property
    def ranks(self) -> int:
        return len(self.replicas)

    def owned(self, rank: int) -> list[int]:
        """The experts that a rank owns, in ascending order."""
        return [expert for expert, owner in enumerate(self.owners) if owner == rank]

    def places(self) -> list[int]:
        """Of each expert, where the experts of all ranks are listed, each rank's in ascending
        order."""
        listed = sorted(range(self.experts), key=lambda expert: self.owners[expert])
        return sorted(range(self.experts), key=lambda place: listed[place])

    def holders(self, expert: int) -> list[int]:
        """The ranks that have an expert, in ascending order."""
        with_copy = [rank for rank, copies in enumerate(self.replicas) if expert in copies]
        return sorted([self.owners[expert], *with_copy])

    def filled(self) -> ExpertMap:
        """The same owners, with a copy in every slot: of the experts after those of the rank."""
        copied = []
        for rank in range(self.ranks):
            first = self.owned(rank)[-1] + 1
            after = [(first + i) % self.experts for i in range(self.experts)]
            copied.append([e for e in after if self.owners[e] != rank][: self.slots])
        return self.with_replicas(copied)

    def with_replicas(self, copies: Sequence[Sequence[int]]) -> ExpertMap:
        """The same owners, with these copies of each rank, in any order."""
        return replace(self, replicas=tuple(tuple(sorted(each)) for each in copies))


def _whole(values: Any) -> bool:
    """Whether these are whole numbers, in a list."""
    return isinstance(values, list) and all(type(v) is int for v in values)
