"""Every context-parallel configuration that a model allows, with its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.config.context import ContextConfig
from megapipe.context.plan import Kind, Message, What
from megapipe.context.score_rects import attention_flops, score_rects
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
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.p2p import link_speed
from megapipe.layout.speeds import Speeds
from megapipe.plan.kernel_time import KernelTime
from megapipe.util.dtypes import Dtype


@dataclass(frozen=True)
class ContextOption:
    """A context-parallel configuration and its cost per layer and micro-batch, forward plus
    backward."""

    context: ContextConfig
    intra_node_bytes: int
    """Maximum number of bytes that a rank sends to other ranks of its node."""
    inter_node_bytes: int
    """Maximum number of bytes that a rank sends to other nodes."""
    rounds: int
    work: float
    """Sum over rounds of the slowest rank's work, relative to the mean work of a rank."""
    bundles: int
    """Maximum number of KV shards (keys and values of one ring rank) that a rank has in memory at
    once, including its own shard and receives in flight."""

    @property
    def name(self) -> str:
        """Name of the algorithm, with the size of inner rings or teams."""
        context = self.context
        more = [f"inner {context.inner_ring_size}"] if context.inner_ring_size else []
        more += [f"team {context.team_size}"] if context.team_size else []
        return " ".join([context.algorithm, *more])

    @property
    def keys(self) -> list[str]:
        """Settings of the section `context` that differ from the defaults: ``context.X=value``."""
        values = self.context.model_dump()
        default = ContextConfig().model_dump()
        return [f"context.{key}={value}" for key, value in values.items() if value != default[key]]


@dataclass(frozen=True)
class ContextCost(ContextOption):
    """A context-parallel configuration with its cost and its simulated time on a device."""

    seconds: float
    """Seconds of attention until the last rank has finished, forward plus backward."""
    exposed: Mapping[Pass, float]
    """Seconds, per pass, in which an average rank waits for messages or for ranks with more
    work."""


def costs(config: Config, speeds: Speeds) -> list[ContextCost]:
    """Return all possible context-parallel configurations with their costs, the fastest first.
    `config` is resolved. Raises :class:`ConfigError` if its attention supports none."""
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
    """Yield sections `context` to try; some are refused later. Double rings and teams that equal a
    plain ring are left out: one inner ring, inner rings of one rank, teams of one rank."""
    for ulysses in (n for n in range(1, cp + 1) if cp % n == 0):
        ring = cp // ulysses
        both = ring > 1 and ulysses > 1
        of_ring: list[dict[str, Any]] = [{}]
        if ring > 1:
            inner = [size for size in range(2, ring) if ring % size == 0]
            teams = [size for size in range(2, ring + 1) if ring % size**2 == 0]
            plans: list[dict[str, Any]] = [{"algorithm": "ring"}, {"algorithm": "all_gather"}]
            plans += [{"algorithm": "double_ring", "inner_ring_size": size} for size in inner]
            plans += [{"algorithm": "teams", "team_size": size} for size in teams]
            splits = ("zigzag", "striped", "contiguous")
            of_ring = [{**plan, "position_split": split} for plan in plans for split in splits]
            of_ring += [{"algorithm": "helpers", "position_split": "contiguous"}]
        ranks = ("heads_first", "context_first") if both else ("heads_first",)
        for own, first in product(of_ring, ranks):
            yield ContextConfig.model_validate({"ulysses": ulysses, "rank_order": first, **own})


class Attention(NamedTuple):
    """Attention of one layer on a micro-batch without slices: split, ring plans, tensors."""

    split: PositionSplit
    plans: ContextPlans
    tensors: RingTensors
    dtype: Dtype

    @classmethod
    def of(cls, config: Config) -> Attention:
        """Describe the attention of a resolved configuration. Raises :class:`ConfigError`."""
        split, attention = split_of(config), model_spec_of(config).kernel_needs.attention
        assert attention is not None, "asked for a model whose attention megapipe computes"
        check_context(config, split, 1, attention)
        plans = context_plans(config, split, attention)
        return cls(split, plans, ring_tensors(config, split, attention), config.model.dtype)

    def sizes(self, what: Pass) -> Callable[[What, Kind], int]:
        """Return a function that counts the bytes of a message in pass `what`."""
        carried = partial(self.tensors.carried, backward=what == "I")
        return cache(lambda what, kind: size_of(carried(what, kind), self.dtype))


class CpTopology(NamedTuple):
    """Nodes of the context-parallel ranks, and the speed of links between them."""

    config: Config

    def node(self, rank: int) -> int:
        """Return the index of a context-parallel rank's node, assuming that rank 0 is the first of
        its node."""
        parallel = self.config.parallel
        return rank * parallel.tp // parallel.ranks_per_node

    def same_node(self, one: int, other: int) -> bool:
        """Whether two context-parallel ranks of a group are on one node."""
        return self.node(one) == self.node(other)

    def rate(self, *, within: bool) -> float:
        """Return the bytes per second of a link inside a node (`within`) or between nodes."""
        return 1e9 * link_speed(self.config, within=within)


def option_of(config: Config) -> ContextOption:
    """Return the option that a resolved configuration describes. Raises :class:`ConfigError`."""
    return _option(config, Attention.of(config), CpTopology(config))


def _option(config: Config, own: Attention, topology: CpTopology) -> ContextOption:
    sent = {True: [0] * own.split.cp, False: [0] * own.split.cp}
    for what, index in product(PASSES, range(own.split.cp)):
        for within, size in bytes_sent(own, topology, what, index):
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
    """Return a configuration's option, with its time at the given speeds. Raises ConfigError."""
    own, topology, kernels = Attention.of(config), CpTopology(config), KernelTime(speeds)
    scores, (_, rows, heads, head_dim) = _scores(config, own.split), own.tensors.queries

    def seconds_of(what: Pass, i: int, j: int) -> float:
        computed = rows * heads * scores(i, j)
        backward = what == "I"
        flops = attention_flops(computed, head_dim, backward=backward)
        return kernels.attention(flops, backward=backward)

    whole, exposed = 0.0, {}
    for what in PASSES:
        work = partial(seconds_of, what)
        timed = max(_timed(own, topology, what, work, ulysses) for ulysses in _rings(own, topology))
        blocking = _blocking(own, topology, what)
        whole += timed.whole + blocking
        exposed[what] = timed.exposed + blocking
    return ContextCost(**vars(_option(config, own, topology)), seconds=whole, exposed=exposed)


def _scores(config: Config, split: PositionSplit) -> Callable[[int, int], int]:
    """Return a function (i, j) -> number of scores of rank i's queries and rank j's keys, per
    head."""
    blocks = split.local([config.train.sequence_length], 0).blocks
    return cache(lambda i, j: sum(entry.scores for entry in score_rects(blocks[i], blocks[j])))


def _rings(own: Attention, topology: CpTopology) -> Iterable[int]:
    """Return the Ulysses indices to simulate: one per distribution of a ring's ranks over nodes."""
    split = own.split
    found: dict[tuple[int, ...], int] = {}
    for ulysses in range(split.ulysses):
        nodes = [topology.node(split.index(ring, ulysses)) for ring in range(split.ring)]
        found.setdefault(tuple(map(nodes.index, nodes)), ulysses)
    return found.values()


def _timed(
    own: Attention,
    topology: CpTopology,
    what: Pass,
    work: Callable[[int, int], float],
    ulysses: int,
) -> PlanTiming:
    """Simulate the ring that consists of the ranks with Ulysses index `ulysses`."""
    split, size_of_message = own.split, own.sizes(what)
    plan, messages = own.plans.of(what)

    def link(message: Message) -> MessageLink:
        ends = split.index(message.source, ulysses), split.index(message.target, ulysses)
        within = topology.same_node(*ends)
        size = size_of_message(message.what, message.kind)
        return MessageLink(within, size / topology.rate(within=within))

    return simulate(plan, () if own.plans.gathers else messages, work, link)


def bytes_sent(
    own: Attention, topology: CpTopology, what: Pass, index: int
) -> Iterator[tuple[bool, int]]:
    """Yield (whether the receiver is on the sender's node, bytes) of all that a cp rank sends."""
    yield from _collective_bytes(own, topology, what, index)
    split, size = own.split, own.sizes(what)
    ring, ulysses = split.coordinates(index)
    for message in () if own.plans.gathers else chain(*own.plans.part(what, ring).messages):
        if message.source == ring:
            peer = split.index(message.target, ulysses)
            within = topology.same_node(index, peer)
            yield within, size(message.what, message.kind)


def _collective_bytes(
    own: Attention, topology: CpTopology, what: Pass, index: int
) -> Iterator[tuple[bool, int]]:
    """Yield the part of :func:`bytes_sent` for Ulysses all-to-alls and key all-gathers."""
    split, n = own.split, own.split.ulysses
    exchanged = size_of(own.tensors.exchanged, own.dtype) // n
    gathered = size_of(own.tensors.gathered(backward=what == "I"), own.dtype)
    ring, ulysses = split.coordinates(index)
    for other in range(n):
        if other != ulysses:
            peer = split.index(ring, other)
            yield topology.same_node(index, peer), exchanged
    if own.plans.gathers:
        for other in range(split.ring):
            if other != ring:
                peer = split.index(other, ulysses)
                yield topology.same_node(index, peer), gathered


def _blocking(own: Attention, topology: CpTopology, what: Pass) -> float:
    """Return the seconds of collectives that overlap with no compute, on the slowest rank."""
    most = 0.0
    for index in range(own.split.cp):
        sent = {True: 0, False: 0}
        for within, size in _collective_bytes(own, topology, what, index):
            sent[within] += size
        most = max(most, *(size / topology.rate(within=w) for w, size in sent.items()))
    return most
