"""Bytes of dispatch and combine in one layer and micro-batch, for each ``experts.dispatch``.

==============  ================================================================================
all_to_all      a row for each choice of a token is sent to its expert, its output back
hierarchical    rows and outputs as in all_to_all, in two all-to-alls: within the node to the rank
                with the receiver's local index, then between nodes (Tutel, 2206.03382)
all_gather      every rank gets every token with its choices, rows of outputs are sent back
fetch           experts are sent to the tokens, their gradients back (Janus)
==============  ================================================================================

In an input gradient, gradients are sent instead of rows and outputs. The traffic is measured by
running the layer without values, with evenly chosen experts. The bytes of rows are divided equally
between dispatch and combine, which differ only by the 4 bytes of a row's weight. Row counts, which
ranks exchange before, are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.moe.dispatch import dispatch_candidates
from megapipe.layout.p2p import in_nodes, processes
from megapipe.plan.unit import SPLIT, TWO_HOPS, Operation, Transfer, Unit
from megapipe.plan.units import Units
from megapipe.schedule.moe_layer.tasks import Resource

OF_ROWS = ("all_to_all", "hierarchical")
"""Dispatch modes that send rows, which are first permuted by destination rank."""


class LinkBytes(NamedTuple):
    """Bytes that a rank sends over one kind of link, within a node or between nodes."""

    link: Resource
    bytes: Fraction


class PassTraffic(NamedTuple):
    """Traffic of a pass: transfers before (`out`) and after (`back`) the experts' compute."""

    out: tuple[LinkBytes, ...]
    back: tuple[LinkBytes, ...]


class DispatchTraffic(NamedTuple):
    """Traffic of one ``experts.dispatch`` in a layer."""

    trips: Mapping[Pass, PassTraffic]
    weight_grad_hops: tuple[LinkBytes, ...]
    """Transfers of W: gradients of fetched experts."""
    intra_node_bytes: Fraction
    """Bytes that a rank sends to other ranks of its node, forward and backward."""
    inter_node_bytes: Fraction
    """Bytes that a rank sends to other nodes; the maximum over ranks if the ranks of a group are
    spread unevenly over nodes."""


def dispatch_traffic(units: Units, layer: int) -> dict[str, DispatchTraffic]:
    """Return the traffic by ``experts.dispatch``, for a layer whose experts are split over ranks.
    With ``experts.wire_dtype``, only dispatch modes that send rows are included."""
    names = list(dispatch_candidates(units.config))
    if _node(units.config) is not None:
        names.append("hierarchical")
    return {name: traffic_of(units, layer, name) for name in names}


def traffic_of(units: Units, layer: int, name: str) -> DispatchTraffic:
    """Return the traffic of dispatch mode `name` in a layer whose experts are split over ranks."""
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
    """Return an operation's collectives that dispatch or combine rows, or fetch experts."""
    return [each for each in unit.transfers(what) if is_of_experts(each)]


def is_of_experts(transfer: Transfer) -> bool:
    """Whether a transfer carries rows or expert matrices, rather than row counts (int64)."""
    return transfer.axis.startswith("ep") and transfer.dtype != "int64"


def _node(config: Config) -> int | None:
    """Return the ranks per node for hierarchical dispatch: the configured number, or else the
    number of the group's ranks on a node if that is equal on all nodes, or else None."""
    ranks, beside = _expert_ranks(config), _beside(config)
    if config.experts.dispatch == "hierarchical":
        return config.experts.ranks_per_node
    return beside if ranks > beside > 1 and ranks % beside == 0 else None


def _expert_ranks(config: Config) -> int:
    return config.parallel.ep * config.parallel.etp


def _beside(config: Config) -> int:
    """Return how many ranks of an expert-parallel group are on a rank's node, including the rank:
    the minimum over all ranks."""
    parallel = config.parallel
    ranks, per_node = _expert_ranks(config), parallel.ranks_per_node
    world = processes(config)
    if config.pipeline.transport == "in_process":
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
    halves = tuple(LinkBytes(hop.link, hop.bytes / 2) for hop in rows)  # half each way
    return PassTraffic(halves, halves[::-1])


def _hops(config: Config, unit: Unit, what: Operation, kind: str) -> Iterator[LinkBytes]:
    """Yield the bytes sent in collectives of a `kind`. With hierarchical dispatch, the bytes within
    nodes come first."""
    sent: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    for each in experts_sent(unit, what):
        if each.kind == kind:
            near = each.axis == TWO_HOPS[0]
            sent[each.axis, each.members if near else _expert_ranks(config)] += each.wire
    for axis, neighbours in sorted(sent, key=lambda key: key[1]):
        link: Resource = "node" if in_nodes(config, neighbours) else "network"
        yield LinkBytes(link, sent[axis, neighbours])
