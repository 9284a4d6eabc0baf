"""Every way to attend over split positions that a configuration allows, with what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.config.context import ContextConfig
from megapipe.context.entries import attention_flops, score_rects
from megapipe.context.plan import Kind, Message, What
from megapipe.context.simulate import MessageLink, PlanTiming, simulate
from megapipe.context.split import PositionSplit
from megapipe.context.tensors import RingTensors, size_of
from megapipe.errors import ConfigError
from megapipe.layout.context_checks import check_context, split_of
from megapipe.layout.context_plan import (
    PASSES,
    ContextPlans,
    Pass,
    context_plans,
    ring_tensors,
)
from megapipe.layout.speeds import Speeds
from megapipe.util.dtypes import Dtype


@dataclass(frozen=True)
class ContextOption:
    """A way to attend, and what it takes of one layer and micro-batch, forward and backward."""

    context: ContextConfig
    intra_node_bytes: int
    """Bytes that the rank which sends most sends to others of its node."""
    inter_node_bytes: int
    """The same to other nodes."""
    rounds: int
    work: float
    """Work of the slowest rank, round by round, by that of the mean rank."""
    bundles: int
    """Key bundles that a rank has or expects at a time, its own included."""

    @property
    def name(self) -> str:
        """The plan in a few words."""
        context = self.context
        more = [f"inner {context.inner}"] if context.inner else []
        more += [f"team {context.team}"] if context.team else []
        return " ".join([context.plan, *more])

    @property
    def keys(self) -> list[str]:
        """The keys of the configuration that are not as by default."""
        given = self.context.model_dump()
        default = ContextConfig().model_dump()
        return [f"context.{key}={value}" for key, value in given.items() if value != default[key]]


@dataclass(frozen=True)
class ContextCost(ContextOption):
    """The same, with its time on a device."""

    seconds: float
    """Until the last rank is through."""
    exposed: Mapping[Pass, float]
    """Of the seconds of the forward and the backward those in which an average rank waits: for
    messages, and for others with more work."""


def costs(config: Config, speeds: Speeds) -> list[ContextCost]:
    """All that are possible, the fastest first, of a resolved configuration and its device's speed.

    Raises :class:`ConfigError` where its model attends otherwise than plans can.
    """
    found = []
    problem: ConfigError | None = None
    for context in _candidates(config.parallel.cp):
        made = config.model_copy(update={"context": context})
        try:
            found.append(cost_of(made, speeds))
        except ConfigError as error:
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return sorted(
        found,
        key=lambda cost: (cost.seconds, cost.inter_node_bytes, cost.intra_node_bytes, cost.bundles),
    )


def _candidates(cp: int) -> Iterator[ContextConfig]:
    """Sections, of which some are refused. A double ring of one ring, or of rings of one rank, and
    teams of one are a ring."""
    for ulysses in (n for n in range(1, cp + 1) if cp % n == 0):
        ring = cp // ulysses
        both = ring > 1 and ulysses > 1
        of_ring: list[dict[str, Any]] = [{}]
        if ring > 1:
            plans: list[dict[str, Any]] = [{"plan": "ring"}, {"plan": "all_gather"}]
            plans += [{"plan": "double_ring", "inner": i} for i in range(2, ring) if ring % i == 0]
            plans += [{"plan": "teams", "team": c} for c in range(2, ring + 1) if ring % c**2 == 0]
            orders = ("zigzag", "striped", "contiguous")
            of_ring = [{**plan, "order": order} for plan in plans for order in orders]
            of_ring += [{"plan": "helpers", "order": "contiguous"}]
        ranks = ("heads_first", "context_first") if both else ("heads_first",)
        for own, first in product(of_ring, ranks):
            yield ContextConfig.model_validate({"ulysses": ulysses, "ranks": first, **own})


class Attention(NamedTuple):
    """The attention of a layer and micro-batch, whose sequences are not cut into slices."""

    split: PositionSplit
    plans: ContextPlans
    tensors: RingTensors
    dtype: Dtype

    @classmethod
    def of(cls, config: Config) -> Attention:
        """Describe the attention of a resolved configuration. Raises :class:`ConfigError`."""
        split = split_of(config)
        check_context(config, split, 1)
        plans, tensors = context_plans(config, split), ring_tensors(config, split)
        return cls(split, plans, tensors, config.model.dtype)

    def sizes(self, what: Pass) -> Callable[[What, Kind], int]:
        """Return a function that counts the bytes of a message of the forward or the backward."""
        carried = partial(self.tensors.carried, backward=what == "I")
        return cache(lambda what, kind: size_of(carried(what, kind), self.dtype))


class Places(NamedTuple):
    """Where ranks are, and how fast they reach each other."""

    config: Config

    def node(self, rank: int) -> int:
        """Of a context-parallel rank of the group that begins with a node."""
        parallel = self.config.parallel
        return rank * parallel.tp // parallel.per_node

    def same_node(self, one: int, other: int) -> bool:
        """Whether two context-parallel ranks of a group are on one node."""
        return self.node(one) == self.node(other)

    def rate(self, *, within: bool) -> float:
        """Bytes per second."""
        parallel = self.config.parallel
        return 1e9 * (parallel.node_gb_s if within else parallel.network_gb_s)


def way_of(config: Config) -> ContextOption:
    """A resolved configuration's own way, on any device. Raises :class:`ConfigError`."""
    return _way(config, Attention.of(config), Places(config))


def _way(config: Config, own: Attention, places: Places) -> ContextOption:
    sent = {True: [0] * own.split.cp, False: [0] * own.split.cp}
    for what, index in product(PASSES, range(own.split.cp)):
        for within, size in bytes_sent(own, places, what, index):
            sent[within][index] += size
    forward, n, scores = own.plans.forward, own.split.ring, _scores(config, own.split)
    mean = sum(scores(i, j) for i, j in product(range(n), repeat=2)) / n
    slowest = sum(
        max(0 if pair is None else scores(*pair) for pair in pairs) for pairs in forward.rounds
    )
    return ContextOption(
        context=config.context,
        intra_node_bytes=max(sent[True]),
        inter_node_bytes=max(sent[False]),
        rounds=forward.length,
        work=slowest / mean,
        bundles=n if own.plans.gathers else forward.max_bundles["keys"],
    )


def cost_of(config: Config, speeds: Speeds) -> ContextCost:
    """The same with its time, on a device of known speed. Raises :class:`ConfigError`."""
    own, places = Attention.of(config), Places(config)
    scores, (_, rows, heads, head_dim) = _scores(config, own.split), own.tensors.queries

    def seconds_of(what: Pass, i: int, j: int) -> float:
        computed = rows * heads * scores(i, j)
        return attention_flops(computed, head_dim, backward=what == "I") / speeds.reached

    whole, exposed = 0.0, {}
    for what in PASSES:
        work = partial(seconds_of, what)
        timed = max(_timed(own, places, what, work, ulysses) for ulysses in _rings(own, places))
        blocking = _blocking(own, places, what)
        whole += timed.whole + blocking
        exposed[what] = timed.exposed + blocking
    return ContextCost(**vars(_way(config, own, places)), seconds=whole, exposed=exposed)


def _scores(config: Config, split: PositionSplit) -> Callable[[int, int], int]:
    """How many scores of a sample and head are of the queries and of the keys of two members."""
    blocks = split.local([config.train.sequence_length], 0).blocks
    return cache(lambda i, j: sum(entry.scores for entry in score_rects(blocks[i], blocks[j])))


def _rings(own: Attention, places: Places) -> Iterable[int]:
    """Ulysses indices whose rings lie differently over nodes, one of each kind."""
    split = own.split
    found: dict[tuple[int, ...], int] = {}
    for ulysses in range(split.ulysses):
        nodes = [places.node(split.index(ring, ulysses)) for ring in range(split.ring)]
        found.setdefault(tuple(map(nodes.index, nodes)), ulysses)
    return found.values()


def _timed(
    own: Attention,
    places: Places,
    what: Pass,
    work: Callable[[int, int], float],
    ulysses: int,
) -> PlanTiming:
    """The rounds of the ring of the ranks of a Ulysses index."""
    split, size_of_message = own.split, own.sizes(what)
    plan, messages = own.plans.of(what)

    def link(message: Message) -> MessageLink:
        ends = split.index(message.source, ulysses), split.index(message.target, ulysses)
        within = places.same_node(*ends)
        size = size_of_message(message.what, message.kind)
        return MessageLink(within, size / places.rate(within=within))

    return simulate(plan, () if own.plans.gathers else messages, work, link)


def bytes_sent(
    own: Attention, places: Places, what: Pass, index: int
) -> Iterator[tuple[bool, int]]:
    """Bytes that a rank sends, each with whether to its own node."""
    yield from _collective_bytes(own, places, what, index)
    split, size = own.split, own.sizes(what)
    ring, ulysses = split.place(index)
    for message in () if own.plans.gathers else chain(*own.plans.part(what, ring).messages):
        if message.source == ring:
            peer = split.index(message.target, ulysses)
            within = places.same_node(index, peer)
            yield within, size(message.what, message.kind)


def _collective_bytes(
    own: Attention, places: Places, what: Pass, index: int
) -> Iterator[tuple[bool, int]]:
    """The same of exchanges of heads and positions, and of gathered keys."""
    split, n = own.split, own.split.ulysses
    exchanged = size_of(own.tensors.exchanged, own.dtype) // n
    gathered = size_of(own.tensors.gathered(backward=what == "I"), own.dtype)
    ring, ulysses = split.place(index)
    for other in range(n):
        if other != ulysses:
            peer = split.index(ring, other)
            yield places.same_node(index, peer), exchanged
    if own.plans.gathers:
        for other in range(split.ring):
            if other != ring:
                peer = split.index(other, ulysses)
                yield places.same_node(index, peer), gathered


def _blocking(own: Attention, places: Places, what: Pass) -> float:
    """Seconds of the collectives during which nothing is computed, of the slowest rank."""
    most = 0.0
    for index in range(own.split.cp):
        sent = {True: 0, False: 0}
        for within, size in _collective_bytes(own, places, what, index):
            sent[within] += size
        most = max(most, *(size / places.rate(within=w) for w, size in sent.items()))
    return most
