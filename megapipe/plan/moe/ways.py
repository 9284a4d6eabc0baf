"""Bytes to experts and back in one layer and micro-batch, by each way to exchange them.

==============  ================================================================================
all_to_all      a row for each choice of a token travels to its expert, its output back
hierarchical    the same in two hops: within nodes to the rank that has the receiver's place in its
                own node, and from there between nodes (Tutel, 2206.03382)
all_gather      every rank gets every token with its choices, rows of outputs come back
fetch           experts travel to the tokens, their gradients back (Janus)
==============  ================================================================================

In an input gradient gradients travel in the place of rows and outputs. All are forms of
``experts.dispatch``, and what each sends is what a layer sends that runs with it without values.
Experts are chosen evenly. Of rows the way there and the way back count as equal halves: they differ
by the 4 bytes of a row's weight. Numbers of rows, which ranks tell each other before, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.links import in_nodes, processes
from megapipe.layout.moe.dispatch import dispatch_candidates
from megapipe.plan.unit import SPLIT, TWO_HOPS, Operation, Transfer, Unit
from megapipe.plan.units import Units
from megapipe.schedule.moe_layer.tasks import Resource

OF_ROWS = ("all_to_all", "hierarchical")
"""Ways in which rows travel, put in the order of their ranks before they leave."""


class LinkBytes(NamedTuple):
    """Bytes that a rank sends over a link."""

    link: Resource
    bytes: Fraction


class PassTraffic(NamedTuple):
    """The hops of a pass before experts compute, and when they have."""

    out: tuple[LinkBytes, ...]
    back: tuple[LinkBytes, ...]


class DispatchTraffic(NamedTuple):
    """A way to bring tokens and experts together."""

    trips: Mapping[Pass, PassTraffic]
    weight_grad_hops: tuple[LinkBytes, ...]
    """Gradients of experts, which W sends."""
    intra_node_bytes: Fraction
    """Bytes that a rank sends to others of its node, forward and backward."""
    inter_node_bytes: Fraction
    """Bytes to other nodes; where nodes have other parts of a group each, the most."""


def dispatch_traffic(units: Units, layer: int) -> dict[str, DispatchTraffic]:
    """Find all ways of a layer whose experts are split over several ranks, by name; with a codec
    those of rows alone."""
    names = list(dispatch_candidates(units.config))
    if _node(units.config) is not None:
        names.append("hierarchical")
    return {name: way_of(units, layer, name) for name in names}


def way_of(units: Units, layer: int, name: str) -> DispatchTraffic:
    """Find one way of a layer whose experts are split over several ranks."""
    config = units.config
    unit = units.of_layer(layer, name, _node(config) if name == "hierarchical" else None)
    trips = {what: _trip(config, unit, what) for what in PASSES}
    ranks, beside = _expert_ranks(config), _beside(config)
    sent: defaultdict[str, Fraction] = defaultdict(Fraction)
    for each in (each for what in SPLIT for each in experts_sent(unit, what)):
        sent[each.axis] += each.wire
    to_each = sent["ep"] / (ranks - 1)
    return DispatchTraffic(
        trips,
        weight_grad_hops=tuple(_hops(config, unit, "W", "reduce_scatter")),
        intra_node_bytes=sent[TWO_HOPS[0]] + to_each * (beside - 1),
        inter_node_bytes=sent[TWO_HOPS[1]] + to_each * (ranks - beside),
    )


def experts_sent(unit: Unit, what: Operation) -> list[Transfer]:
    """List the collectives of an operation that bring tokens and experts together."""
    return [each for each in unit.transfers(what) if is_of_experts(each)]


def is_of_experts(transfer: Transfer) -> bool:
    """Whether rows or matrices travel; numbers of rows are int64."""
    return transfer.axis.startswith("ep") and transfer.dtype != "int64"


def _node(config: Config) -> int | None:
    """Find the ranks of a node for two hops: as configured, or where nodes have equal parts of a
    group."""
    ranks, beside = _expert_ranks(config), _beside(config)
    if config.experts.dispatch == "hierarchical":
        return config.experts.node
    return beside if ranks > beside > 1 and ranks % beside == 0 else None


def _expert_ranks(config: Config) -> int:
    return config.parallel.ep * config.parallel.etp


def _beside(config: Config) -> int:
    """Count the ranks with which a rank shares experts that are on its node, itself one of them: of
    the rank that has fewest."""
    parallel = config.parallel
    ranks, per_node = _expert_ranks(config), parallel.per_node
    world = processes(config)
    if config.pipeline.channels == "in_process":
        world //= parallel.pp
    fewest = ranks
    for rank in range(min(world, lcm(ranks, per_node))):
        group, node = rank // ranks * ranks, rank // per_node * per_node
        fewest = min(fewest, min(group + ranks, node + per_node) - max(group, node))
    return fewest


def _trip(config: Config, unit: Unit, what: Pass) -> PassTraffic:
    gathered = tuple(_hops(config, unit, what, "all_gather"))
    rows = tuple(_hops(config, unit, what, "all_to_all"))
    if gathered:
        return PassTraffic(gathered, rows)
    halves = tuple(LinkBytes(hop.link, hop.bytes / 2) for hop in rows)  # they go both ways
    return PassTraffic(halves, halves[::-1])


def _hops(config: Config, unit: Unit, what: Operation, kind: str) -> Iterator[LinkBytes]:
    """Yield what a rank sends in collectives of a kind, of two hops within nodes first."""
    sent: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    for each in experts_sent(unit, what):
        if each.kind == kind:
            near = each.axis == TWO_HOPS[0]
            sent[each.axis, each.members if near else _expert_ranks(config)] += each.wire
    for axis, neighbours in sorted(sent, key=lambda key: key[1]):
        link: Resource = "node" if in_nodes(config, neighbours) else "network"
        yield LinkBytes(link, sent[axis, neighbours])
