"""Who attends to what when: a plan, and what follows from it.

Every rank p of n is the home of a bundle of queries and of one of keys (and values). A plan lists,
for each round and rank, the pair (queries of i, keys of j) that the rank computes. All else is
derived from that, for the forward and, mirrored, for the backward:

- a bundle visits the ranks that use it in the order of first use, its home first; each hands it on
  to the next, or another rank that has had it does (``sources``);
- queries away from home give a partial result of a rank, which goes home in one hop when the rank
  is through with them, and is merged there in the order of the visits;
- gradients of a bundle are added up along its visits, from the first rank away from home on, and go
  home from the last; what the home itself has found never travels.

A round begins with an exchange, in which its messages leave and are expected; they are waited for
when they are used, a round later at the earliest. What no round is left for is exchanged after the
last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megapipe.errors import MegapipeError

Pair = tuple[int, int]
"""(home of queries, home of keys)."""
Kind = Literal["queries", "keys"]
What = Literal["bundle", "partial", "gradient"]
UNDER_WAY = 2
"""Exchanges whose messages may not have left yet; the executor holds their tensors."""
KINDS: tuple[Kind, ...] = ("queries", "keys")


class PlanError(MegapipeError):
    """A plan that does not compute each block once, or cannot be executed."""


class Visit(NamedTuple):
    """The time of a bundle at a rank."""

    rank: int
    first: int
    """Round of its first use."""
    last: int


class Message(NamedTuple):
    """A bundle, a partial result of queries, or the gradients of a bundle on their way."""

    what: What
    kind: Kind
    home: int
    source: int
    target: int
    sent: int
    """The exchange it is in: that of this round's beginning, or from the number of rounds on, one
    after the last round."""
    due: int
    """The round before which a bundle is needed; after which the target is through with the
    gradients to which these are added; for what goes home, the number of rounds."""
    channel: str = ""
    """Of links that carry a message each at the same time: a name for it."""


class RankPlan(NamedTuple):
    """The share of one rank in the forward or in the backward of a plan."""

    pairs: tuple[Pair | None, ...]
    """By round."""
    messages: tuple[tuple[Message, ...], ...]
    """By exchange, those that it sends or receives; as many exchanges on every rank."""
    needed: Mapping[tuple[Kind, int], int]
    """The last round in which a bundle is used here or sent on."""


@dataclass(frozen=True)
class Plan:
    """The pairs that n ranks compute, round by round."""

    name: str
    rounds: tuple[tuple[Pair | None, ...], ...]
    """[round][rank]."""
    sources: Mapping[tuple[Kind, int, int], tuple[int, str]] = field(default_factory=dict)
    """(kind, home, rank) -> who sends a bundle to that rank, where it is not the rank it visited
    before, and the lane of the message, which is sent as early as can be; others are sent in the
    exchange before the round."""

    @property
    def ranks(self) -> int:
        return len(self.rounds[0])

    @cached_property
    def visits(self) -> dict[tuple[Kind, int], list[Visit]]:
        """Of each bundle in order, that of its home first."""
        used: dict[tuple[Kind, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, pairs in enumerate(self.rounds):
            for rank, pair in enumerate(pairs):
                for kind, home in zip(KINDS, pair or (), strict=False):
                    used[kind, home][rank].append(number)
        found = {}
        for kind in KINDS:
            for home in range(self.ranks):
                uses = dict(used[kind, home])
                own = uses.pop(home, [-1])
                away = [Visit(rank, times[0], times[-1]) for rank, times in uses.items()]
                found[kind, home] = [
                    Visit(home, own[0], own[-1]),
                    *sorted(away, key=lambda visit: (visit.first, visit.rank)),
                ]
        return found

    def _bundles(self) -> Iterator[Message]:
        for (kind, home), (own, *away) in self.visits.items():
            arrived = {own.rank: 0}
            before = own.rank
            for visit in away:
                at = kind, home, visit.rank
                source, lane = self.sources.get(at, (before, ""))
                if source not in arrived or arrived[source] >= visit.first:
                    raise PlanError(
                        f"plan {self.name}: rank {source} does not have the {kind} of {home} in "
                        f"time for rank {visit.rank} in round {visit.first}"
                    )
                early = at in self.sources
                sent = arrived[source] if early else max(arrived[source], visit.first - 1)
                yield Message("bundle", kind, home, source, visit.rank, sent, visit.first, lane)
                arrived[visit.rank], before = visit.first, visit.rank

    def _partials(self) -> Iterator[Message]:
        for home in range(self.ranks):
            for visit in self.visits["queries", home][1:]:
                sent = visit.last + 1
                yield Message("partial", "queries", home, visit.rank, home, sent, self.length)

    def _gradients(self) -> Iterator[Message]:
        for (kind, home), (_, *away) in self.visits.items():
            sent = 0
            for number, visit in enumerate(away):
                sent = max(visit.last, sent) + 1
                if number + 1 < len(away):
                    target, due = away[number + 1].rank, away[number + 1].last
                else:
                    target, due = home, self.length
                yield Message("gradient", kind, home, visit.rank, target, sent, due)

    @property
    def length(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    @cached_property
    def forward(self) -> tuple[tuple[Message, ...], ...]:
        """The messages of the forward by exchange: one before each round, the others after all."""
        return self._by_exchange([*self._bundles(), *self._partials()])

    @cached_property
    def backward(self) -> tuple[tuple[Message, ...], ...]:
        """The messages of the backward."""
        return self._by_exchange([*self._bundles(), *self._gradients()])

    def _by_exchange(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
        last = max([self.length - 1, *(message.sent for message in messages)])
        found: list[list[Message]] = [[] for _ in range(last + 1)]
        for message in sorted(messages):
            found[message.sent].append(message)
        return tuple(map(tuple, found))

    @cached_property
    def forward_parts(self) -> tuple[RankPlan, ...]:
        """The share of each rank in the forward."""
        return self._parts(self.forward)

    @cached_property
    def backward_parts(self) -> tuple[RankPlan, ...]:
        """The share of each rank in the backward."""
        return self._parts(self.backward)

    def _parts(self, exchanges: Sequence[Sequence[Message]]) -> tuple[RankPlan, ...]:
        needed: list[dict[tuple[Kind, int], int]] = [{} for _ in range(self.ranks)]
        for number, pairs in enumerate(self.rounds):
            for rank, pair in enumerate(pairs):
                for kind, home in zip(KINDS, pair or (), strict=False):
                    needed[rank][kind, home] = number
        messages: list[list[list[Message]]] = [[[] for _ in exchanges] for _ in range(self.ranks)]
        for number, exchange in enumerate(exchanges):
            for message in exchange:
                for rank in {message.source, message.target}:
                    messages[rank][number].append(message)
                if message.what == "bundle":
                    own, bundle = needed[message.source], (message.kind, message.home)
                    own[bundle] = max(own.get(bundle, 0), number)
        parts = zip(zip(*self.rounds, strict=True), messages, needed, strict=True)
        return tuple(RankPlan(pairs, tuple(map(tuple, own)), used) for pairs, own, used in parts)

    @cached_property
    def max_bundles(self) -> dict[Kind, int]:
        """The most bundles of a kind that a rank has or expects at a time, its own included."""
        begins = {(kind, home, home): 0 for kind in KINDS for home in range(self.ranks)}
        ends = {
            (kind, home, visit.rank): visit.last
            for (kind, home), visits in self.visits.items()
            for visit in visits
        }
        ends |= dict.fromkeys(begins, self.length - 1)
        for message in self._bundles():
            bundle = message.kind, message.home
            begins[(*bundle, message.target)] = message.sent
            source = (*bundle, message.source)
            ends[source] = max(ends[source], message.sent)
        counts: Counter[tuple[Kind, int, int]] = Counter()
        for (kind, home, rank), begin in begins.items():
            counts.update((kind, rank, at) for at in range(begin, ends[kind, home, rank] + 1))
        return {kind: max(count for at, count in counts.items() if at[0] == kind) for kind in KINDS}

    def prove(self, needed: Callable[[int, int], bool]) -> None:
        """Raise :class:`PlanError` unless every pair of homes that is `needed` is computed once,
        with both bundles there, and every rank sends and receives at most one bundle of a kind in
        an exchange and lane."""
        computed = Counter(pair for pairs in self.rounds for pair in pairs if pair is not None)
        for queries in range(self.ranks):
            for keys in range(self.ranks):
                times = computed[queries, keys]
                if times > 1 or (needed(queries, keys) and not times):
                    raise PlanError(
                        f"plan {self.name}: queries of {queries} and keys of {keys} are computed "
                        f"{times} times: expected once"
                    )
        wrong = set(computed) - {(i, j) for i in range(self.ranks) for j in range(self.ranks)}
        if wrong or any(len(pairs) != self.ranks for pairs in self.rounds):
            raise PlanError(f"plan {self.name}: expected pairs of ranks 0 to {self.ranks - 1}")
        for messages in self.forward:
            ends = Counter(
                end
                for m in messages
                if m.what == "bundle"
                for end in (
                    (m.kind, m.channel, "sends", m.source),
                    (m.kind, m.channel, "gets", m.target),
                )
            )
            for (kind, _, verb, rank), count in ends.items():
                if count > 1:
                    raise PlanError(
                        f"plan {self.name}: rank {rank} {verb} {count} bundles of {kind} at a time"
                    )
