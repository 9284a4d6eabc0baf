"""What the ranks of a world have exchanged over the stand-in for NCCL, for comparison.

NCCL matches operations by their order alone. Every rank notes its own operations; :func:`compare`
compares the notes of all ranks at the end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass
class Group:
    """One rank's notes of one process group."""

    ranks: tuple[int, ...]
    collectives: list[tuple[int, str]] = field(default_factory=list)
    """Each collective: its number among all collectives of this rank, and a description."""
    sent: dict[int, list[str]] = field(default_factory=dict)
    """Messages to each other member."""
    received: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class Ledger:
    """One rank's notes."""

    rank: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    communicators: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Operations by name."""
    faults: list[str] = field(default_factory=list)
    _collectives: int = 0

    def open(self, name: str, ranks: Sequence[int]) -> Group:
        """Note a new group; an earlier one may have the same name."""
        again = sum(known.rpartition("#")[0] == name for known in self.groups)
        group = self.groups[f"{name}#{again}"] = Group(tuple(ranks))
        return group

    def collective(self, group: Group, name: str, what: str) -> None:
        self.counts[name] += 1
        self._collectives += 1
        group.collectives.append((self._collectives, what))

    def fault(self, text: str) -> None:
        self.faults.append(text)


def compare(ledgers: Sequence[Ledger]) -> list[str]:
    """Return the differences between the ranks' notes; empty if there are none."""
    return [*_groups_that_differ(ledgers), *_pairs_that_differ(ledgers)]


def _groups_that_differ(ledgers: Sequence[Ledger]) -> Iterator[str]:
    names = dict.fromkeys(itertools.chain.from_iterable(x.groups for x in ledgers))
    for name in names:
        members = {x.rank: x.groups[name] for x in ledgers if name in x.groups}
        (first, notes), *others = members.items()
        for rank, group in others:
            ours, theirs = ([what for _, what in x.collectives] for x in (notes, group))
            if difference := _difference(ours, theirs):
                yield f"collectives of ranks {group.ranks}: {difference} (ranks {first}, {rank})"
        for rank, group in members.items():
            for peer, sent in group.sent.items():
                target = group.ranks[peer]
                received = members[target].received.get(group.ranks.index(rank), [])
                if difference := _difference(sent, received):
                    yield f"messages from rank {rank} to {target}: {difference}"


def _pairs_that_differ(ledgers: Sequence[Ledger]) -> Iterator[str]:
    """Yield where two ranks use their common communicators in different orders: each may then wait
    in another one's kernel."""
    for a, b in itertools.combinations(ledgers, 2):
        shared = [name for name in a.groups if name in b.groups]
        ours, theirs = (list(_uses(x, shared)) for x in (a, b))
        if difference := _difference(ours, theirs):
            yield f"groups that ranks {a.rank} and {b.rank} share: {difference}"


def _uses(ledger: Ledger, names: Sequence[str]) -> Iterator[str]:
    """Yield, in order, which of these groups each collective of a rank uses."""
    uses = [(number, name) for name in names for number, _ in ledger.groups[name].collectives]
    for _, name in sorted(uses):
        yield f"in group {name} of ranks {ledger.groups[name].ranks}"


def _difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    for i, (mine, yours) in enumerate(itertools.zip_longest(ours, theirs, fillvalue="nothing")):
        if mine != yours:
            return f"number {i + 1} is {mine} on one side and {yours} on the other"
    return ""
