"""The map of a layer's experts: the rank that owns each, and the ranks that have replicas.

All ranks own equally many experts. An owner has the experts' weights, master weights and states,
and updates them. A rank may have replicas of other owners' experts, each in a slot, to compute rows
that it would dispatch otherwise. A holder of an expert owns it or has a replica. Ranks are ep
ranks: etp neighbours, which have parts of the same experts, count as one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megapipe.errors import ConfigError
from megapipe.text import count_noun


@dataclass(frozen=True)
class ExpertMap:
    """Owners and replicas of a layer's experts. Raises :class:`ConfigError` if they do not fit."""

    owners: tuple[int, ...]
    """Rank that owns each expert, by expert."""
    replicas: tuple[tuple[int, ...], ...]
    """For each rank, the experts that it has a replica of, in ascending order. A rank has no
    replica of an expert that it owns."""
    slots: int = 0
    """Maximum number of replicas on a rank."""

    def __post_init__(self) -> None:
        experts, ranks = len(self.owners), len(self.replicas)
        if not ranks or not experts or experts % ranks:
            raise ConfigError(
                f"{count_noun(experts, 'expert')} cannot be split evenly over "
                f"{count_noun(ranks, 'rank')}"
            )
        for expert, owner in enumerate(self.owners):
            if not 0 <= owner < ranks:
                raise ConfigError(
                    f"owner {owner} of expert {expert}: expected a rank from 0 to {ranks - 1}"
                )
        for rank, replicas in enumerate(self.replicas):
            self._check(rank, replicas)

    def _check(self, rank: int, replicas: tuple[int, ...]) -> None:
        experts, each = len(self.owners), len(self.owners) // len(self.replicas)
        own = self.owners.count(rank)
        if own != each:
            raise ConfigError(
                f"rank {rank} owns {count_noun(own, 'expert')}: expected {each}, as on every rank"
            )
        if list(replicas) != sorted(set(replicas)):
            raise ConfigError(
                f"replicas {list(replicas)} of rank {rank}: expected each once, in order"
            )
        if len(replicas) > self.slots:
            raise ConfigError(
                f"rank {rank} has {len(replicas)} replicas: expected at most {self.slots}, its "
                "slots"
            )
        for expert in replicas:
            if not 0 <= expert < experts:
                raise ConfigError(
                    f"replica of expert {expert} on rank {rank}: expected one from 0 to "
                    f"{experts - 1}"
                )
            if self.owners[expert] == rank:
                raise ConfigError(f"rank {rank} has a replica of expert {expert}, which it owns")

    @classmethod
    def even(cls, experts: int, ranks: int, slots: int = 0) -> ExpertMap:
        """Return the initial map of a run: each rank owns consecutive experts, without replicas."""
        each = max(1, experts // ranks)
        return cls(tuple(e // each for e in range(experts)), ((),) * ranks, slots)

    @classmethod
    def stored(cls, value: Any) -> ExpertMap:
        """Build a map from the result of :meth:`plain`. Raises :class:`ConfigError`."""
        if isinstance(value, dict) and "copies" in value:  # of version 0.1
            value = {**value, "replicas": value["copies"]}
            del value["copies"]
        if not (
            isinstance(value, dict)
            and value.keys() == {"owners", "replicas", "slots"}
            and _whole(value["owners"])
            and isinstance(value["replicas"], list)
            and all(map(_whole, value["replicas"]))
            and _whole([value["slots"]])
        ):
            raise ConfigError('expected {"owners": [..], "replicas": [[..], ..], "slots": N}')
        return cls(tuple(value["owners"]), tuple(map(tuple, value["replicas"])), value["slots"])

    def plain(self) -> dict[str, Any]:
        """Return the map as a dictionary that :meth:`stored` reads."""
        replicas = list(map(list, self.replicas))
        return {"owners": list(self.owners), "replicas": replicas, "slots": self.slots}

    @property
    def experts(self) -> int:
        return len(self.owners)

    @property
    def ranks(self) -> int:
        return len(self.replicas)

    def owned(self, rank: int) -> list[int]:
        """Return the experts that a rank owns, in ascending order."""
        return [expert for expert, owner in enumerate(self.owners) if owner == rank]

    def positions(self) -> list[int]:
        """Return each expert's index in the list of all experts in the order (owner, expert)."""
        listed = sorted(range(self.experts), key=lambda expert: self.owners[expert])
        return sorted(range(self.experts), key=lambda position: listed[position])

    def holders(self, expert: int) -> list[int]:
        """Return the ranks that hold an expert, in ascending order."""
        with_copy = [rank for rank, replicas in enumerate(self.replicas) if expert in replicas]
        return sorted([self.owners[expert], *with_copy])

    def filled(self) -> ExpertMap:
        """Return the map without free slots: each rank replicates the experts after its own."""
        copied = []
        for rank in range(self.ranks):
            first = self.owned(rank)[-1] + 1
            after = [(first + i) % self.experts for i in range(self.experts)]
            copied.append([e for e in after if self.owners[e] != rank][: self.slots])
        return self.with_replicas(copied)

    def with_replicas(self, replicas: Sequence[Sequence[int]]) -> ExpertMap:
        """Return the map with the same owners and the given replicas of each rank, in any order."""
        return replace(self, replicas=tuple(tuple(sorted(each)) for each in replicas))


def _whole(values: Any) -> bool:
    """Whether `values` is a list of whole numbers."""
    return isinstance(values, list) and all(type(v) is int for v in values)
