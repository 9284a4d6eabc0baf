"""Ring plans: which queries attend to which keys on which rank in which round.

A *bundle* is what ranks send to each other: the queries of one rank, or its keys and values. This
rank is the *owner* of the bundle. A plan lists, for each round and rank, the pair (queries of owner
i, keys of owner j) that the rank computes. The messages of the forward and of the backward follow
from the pairs:

- a bundle visits the ranks that use it in the order of first use, its owner first; each rank sends
  it to the next one, unless ``sources`` names another sender that has the bundle;
- in the forward, a rank that uses queries of another owner sends their partial result to the owner
  after the last use; the owner merges partial results in the order of the visits;
- in the backward, gradients of a bundle are summed along its visits, from the first rank after the
  owner to the last rank, which sends the sum to the owner. The owner's own gradients are not sent.

Each round begins with an exchange, which starts sends and receives. A rank waits for a message when
it uses the content, a round later at the earliest. Messages for which no round is left are
exchanged after the last round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megapipe.errors import MegapipeError

Pair = tuple[int, int]
"""(rank that owns the queries, rank that owns the keys) of one attention computation."""
Kind = Literal["queries", "keys"]
What = Literal["bundle", "partial", "gradient"]
MAX_IN_FLIGHT = 2
"""Maximum number of exchanges in flight; an exchange is all sends and receives that start before
one round. The executor holds their tensors."""
KINDS: tuple[Kind, ...] = ("queries", "keys")


class PlanError(MegapipeError):
    """Error: a ring plan does not compute each pair exactly once, or cannot be executed."""


class Visit(NamedTuple):
    """First and last round in which a rank uses a bundle: queries, or keys and values."""

    rank: int
    first: int
    """Round of the rank's first use. -1 if the rank owns the bundle, but never uses it."""
    last: int


class Message(NamedTuple):
    """A message of a ring plan. It carries a bundle (queries, or keys and values, of rank `owner`),
    a partial result for these queries, or gradients of the bundle."""

    what: What
    kind: Kind
    owner: int
    source: int
    target: int
    sent: int
    """Index of the exchange that starts the message. Exchange n begins round n, or comes after the
    last round if there is no round n."""
    due: int
    """Round by which the message must arrive: the target uses a bundle in it, and adds received
    gradients to its own after it. For a message to `owner`: the number of rounds."""
    channel: str = ""
    """Name of the channel. Messages of different channels can be in flight together."""


class RankPlan(NamedTuple):
    """Work and messages of one rank in the forward or in the backward of a plan."""

    pairs: tuple[Pair | None, ...]
    """(queries' owner, keys' owner) that the rank computes in each round; None: it is idle."""
    messages: tuple[tuple[Message, ...], ...]
    """Messages that the rank sends or receives in each exchange. All ranks have the same number of
    exchanges."""
    needed: Mapping[tuple[Kind, int], int]
    """Last round in which the rank uses or forwards a bundle, by the bundle's (kind, owner)."""


@dataclass(frozen=True)
class Plan:
    """A ring plan: whose queries attend to whose keys on which rank, round by round."""

    name: str
    rounds: tuple[tuple[Pair | None, ...], ...]
    """(queries' owner, keys' owner) that a rank computes in a round: rounds[round][rank]."""
    sources: Mapping[tuple[Kind, int, int], tuple[int, str]] = field(default_factory=dict)
    """Exceptions from the rule that each rank sends a bundle to the next rank in the order of first
    use. Maps (kind, owner, receiver) to (sender, channel). These bundles are sent as early as
    possible, all others in the exchange before the round that needs them."""

    @property
    def ranks(self) -> int:
        return len(self.rounds[0])

    @cached_property
    def visits(self) -> dict[tuple[Kind, int], list[Visit]]:
        """Ranks that use each bundle, its owner first, then others by first use. The keys are the
        bundles' (kind, owner)."""
        used: dict[tuple[Kind, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, pairs in enumerate(self.rounds):
            for rank, pair in enumerate(pairs):
                for kind, owner in zip(KINDS, pair or (), strict=False):
                    used[kind, owner][rank].append(number)
        found = {}
        for kind in KINDS:
            for owner in range(self.ranks):
                uses = dict(used[kind, owner])
                own = uses.pop(owner, [-1])
                away = [Visit(rank, times[0], times[-1]) for rank, times in uses.items()]
                found[kind, owner] = [
                    Visit(owner, own[0], own[-1]),
                    *sorted(away, key=lambda visit: (visit.first, visit.rank)),
                ]
        return found

    def _bundles(self) -> Iterator[Message]:
        for (kind, owner), (own, *away) in self.visits.items():
            arrived = {own.rank: 0}
            before = own.rank
            for visit in away:
                at = kind, owner, visit.rank
                source, lane = self.sources.get(at, (before, ""))
                if source not in arrived or arrived[source] >= visit.first:
                    raise PlanError(
                        f"plan {self.name}: rank {source} does not have the {kind} of {owner} in "
                        f"time for rank {visit.rank} in round {visit.first}"
                    )
                early = at in self.sources
                sent = arrived[source] if early else max(arrived[source], visit.first - 1)
                yield Message("bundle", kind, owner, source, visit.rank, sent, visit.first, lane)
                arrived[visit.rank], before = visit.first, visit.rank

    def _partials(self) -> Iterator[Message]:
        for owner in range(self.ranks):
            for visit in self.visits["queries", owner][1:]:
                sent = visit.last + 1
                yield Message("partial", "queries", owner, visit.rank, owner, sent, self.length)

    def _gradients(self) -> Iterator[Message]:
        for (kind, owner), (_, *away) in self.visits.items():
            sent = 0
            for number, visit in enumerate(away):
                sent = max(visit.last, sent) + 1
                if number + 1 < len(away):
                    target, due = away[number + 1].rank, away[number + 1].last
                else:
                    target, due = owner, self.length
                yield Message("gradient", kind, owner, visit.rank, target, sent, due)

    @property
    def length(self) -> int:
        """Number of rounds."""
        return len(self.rounds)

    @cached_property
    def forward(self) -> tuple[tuple[Message, ...], ...]:
        """Messages of the forward by exchange: before each round, and after the last round."""
        return self._by_exchange([*self._bundles(), *self._partials()])

    @cached_property
    def backward(self) -> tuple[tuple[Message, ...], ...]:
        """Messages of the backward by exchange, before each round and after the last round."""
        return self._by_exchange([*self._bundles(), *self._gradients()])

    def _by_exchange(self, messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
        last = max([self.length - 1, *(message.sent for message in messages)])
        found: list[list[Message]] = [[] for _ in range(last + 1)]
        for message in sorted(messages):
            found[message.sent].append(message)
        return tuple(map(tuple, found))

    @cached_property
    def forward_parts(self) -> tuple[RankPlan, ...]:
        """Work and messages of each rank in the forward."""
        return self._parts(self.forward)

    @cached_property
    def backward_parts(self) -> tuple[RankPlan, ...]:
        """Work and messages of each rank in the backward."""
        return self._parts(self.backward)

    def _parts(self, exchanges: Sequence[Sequence[Message]]) -> tuple[RankPlan, ...]:
        needed: list[dict[tuple[Kind, int], int]] = [{} for _ in range(self.ranks)]
        for number, pairs in enumerate(self.rounds):
            for rank, pair in enumerate(pairs):
                for kind, owner in zip(KINDS, pair or (), strict=False):
                    needed[rank][kind, owner] = number
        messages: list[list[list[Message]]] = [[[] for _ in exchanges] for _ in range(self.ranks)]
        for number, exchange in enumerate(exchanges):
            for message in exchange:
                for rank in {message.source, message.target}:
                    messages[rank][number].append(message)
                if message.what == "bundle":
                    own, bundle = needed[message.source], (message.kind, message.owner)
                    own[bundle] = max(own.get(bundle, 0), number)
        parts = zip(zip(*self.rounds, strict=True), messages, needed, strict=True)
        return tuple(RankPlan(pairs, tuple(map(tuple, own)), used) for pairs, own, used in parts)

    @cached_property
    def max_bundles(self) -> dict[Kind, int]:
        """Maximum number of bundles of each kind (queries; keys and values) that a rank has in
        memory at once, including its own bundle and receives in flight."""
        begins = {(kind, owner, owner): 0 for kind in KINDS for owner in range(self.ranks)}
        ends = {
            (kind, owner, visit.rank): visit.last
            for (kind, owner), visits in self.visits.items()
            for visit in visits
        }
        ends |= dict.fromkeys(begins, self.length - 1)
        for message in self._bundles():
            bundle = message.kind, message.owner
            begins[(*bundle, message.target)] = message.sent
            source = (*bundle, message.source)
            ends[source] = max(ends[source], message.sent)
        counts: Counter[tuple[Kind, int, int]] = Counter()
        for (kind, owner, rank), begin in begins.items():
            counts.update((kind, rank, at) for at in range(begin, ends[kind, owner, rank] + 1))
        return {kind: max(count for at, count in counts.items() if at[0] == kind) for kind in KINDS}

    def prove(self, needed: Callable[[int, int], bool]) -> None:
        """Check the plan. `needed(i, j)` says whether queries of rank i see any key of rank j.
        Raises :class:`PlanError` unless each needed pair (i, j) is computed once, on a rank that
        has both bundles, and each rank sends and receives at most one bundle of a kind per exchange
        and channel."""
        computed = Counter(pair for pairs in self.rounds for pair in pairs if pair is not None)
        for queries in range(self.ranks):
            for keys in range(self.ranks):
                times = computed[queries, keys]
                if times > 1 or (needed(queries, keys) and not times):
                    raise PlanError(
                        f"plan {self.name}: queries of {queries} and keys of {keys} meet "
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
