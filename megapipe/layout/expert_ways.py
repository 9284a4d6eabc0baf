"""Bytes to experts and back in one layer and micro-batch, by each way to exchange them.

==============  ================================================================================
all_to_all      a row for each choice of a token travels to its expert, its output back
hierarchical    the same in two hops: within nodes to the rank that has the receiver's place in its
                own node, and from there between nodes (Tutel, 2206.03382)
all_gather      every rank gets every token with its choices, rows of outputs come back
fetch           experts travel to the tokens, their gradients back (Janus)
==============  ================================================================================

In an input gradient gradients travel in the place of rows and outputs. Experts are chosen evenly
and no choice is dropped. All are forms of ``experts.dispatch``. Of rows the way there and the way
back count as equal halves: they differ by the 4 bytes of a row's weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from math import lcm
from typing import Literal, NamedTuple

from megapipe.config import Config
from megapipe.layout.dispatch import forms_of, with_dispatch
from megapipe.layout.layout import DeviceKind
from megapipe.layout.links import in_nodes, processes
from megapipe.model.interface import Collective
from megapipe.model.partition import StageSpec
from megapipe.schedule.layer.tasks import Resource

Pass = Literal["F", "I"]
PASSES: tuple[Pass, ...] = ("F", "I")
OF_ROWS = ("all_to_all", "hierarchical")
"""Ways in which rows travel, put in the order of their ranks before they leave."""


class Hop(NamedTuple):
    """Bytes that a rank sends over a link."""

    link: Resource
    bytes: Fraction


class Trip(NamedTuple):
    """The hops of a pass before experts compute, and when they have."""

    out: tuple[Hop, ...]
    back: tuple[Hop, ...]


class Way(NamedTuple):
    """A way to bring tokens and experts together."""

    trips: Mapping[Pass, Trip]
    late: tuple[Hop, ...]
    """Gradients of experts, which W sends."""
    within: Fraction
    """Bytes that a rank sends to others of its node, forward and backward."""
    between: Fraction
    """The same to other nodes; where nodes have other parts of a group each, the most."""


class _Sizes(NamedTuple):
    """Bytes of the whole tensors that travel."""

    trips: Mapping[Pass, tuple[Fraction, Fraction]]
    """Out and back."""
    late: Fraction

    @property
    def whole(self) -> Fraction:
        return sum((sum(each, Fraction(0)) for each in self.trips.values()), self.late)


def ways(config: Config, device: DeviceKind, layer: int) -> dict[str, Way]:
    """All ways of a layer whose experts are split over several ranks, by name; with a codec those
    of rows alone."""
    ranks, beside = config.parallel.ep * config.parallel.etp, _beside(config)
    sizes = {form: _sizes(config, device, layer, form) for form in forms_of(config)}
    found = {form: _one_hop(config, each, ranks, beside) for form, each in sizes.items()}
    node = config.experts.node if config.experts.dispatch == "hierarchical" else None
    if node is None and ranks > beside > 1 and ranks % beside == 0:
        node = beside
    if node is not None:
        found["hierarchical"] = _two_hops(config, sizes["all_to_all"], node, ranks // node)
    return found


def _beside(config: Config) -> int:
    """Of the ranks with which a rank shares experts, those on its node, itself one of them: of the
    rank that has fewest."""
    parallel = config.parallel
    ranks, per_node = parallel.ep * parallel.etp, parallel.per_node
    world = processes(config)
    if config.pipeline.channels == "in_process":
        world //= parallel.pp
    fewest = ranks
    for rank in range(min(world, lcm(ranks, per_node))):
        group, node = rank // ranks * ranks, rank // per_node * per_node
        fewest = min(fewest, min(group + ranks, node + per_node) - max(group, node))
    return fewest


def _sizes(config: Config, device: DeviceKind, layer: int, form: str) -> _Sizes:
    spec, train = StageSpec(False, range(layer, layer + 1), False), config.train
    sent: Counter[tuple[str, Collective]] = Counter()
    family = with_dispatch(config, form, device)
    for each in family.token_traffic(spec, train.microbatch, train.sequence_length):
        sent[each.what, each.collective] += each.bytes
    return _Sizes(
        {what: _halves(sent[what, "all_gather"], sent[what, "all_to_all"]) for what in PASSES},
        late=Fraction(sent["W", "reduce_scatter"]),
    )


def _halves(gathered: int, rows: int) -> tuple[Fraction, Fraction]:
    if not gathered:  # rows go both ways
        return Fraction(rows, 2), Fraction(rows, 2)
    return Fraction(gathered), Fraction(rows)


def _one_hop(config: Config, sizes: _Sizes, ranks: int, beside: int) -> Way:
    """As much to each of the ranks, all over the slowest link between any two."""

    def hops(size: Fraction) -> tuple[Hop, ...]:
        return (Hop(_link(config, ranks), _sent(size, ranks)),) if size else ()

    return Way(
        {what: Trip(hops(out), hops(back)) for what, (out, back) in sizes.trips.items()},
        late=hops(sizes.late),
        within=sizes.whole * (beside - 1) / ranks,
        between=sizes.whole * (ranks - beside) / ranks,
    )


def _two_hops(config: Config, sizes: _Sizes, node: int, nodes: int) -> Way:
    """Within nodes of `node` ranks, and between `nodes` of them."""
    near, far = _link(config, node), _link(config, node * nodes)

    def hops(size: Fraction) -> tuple[Hop, Hop]:
        return Hop(near, _sent(size, node)), Hop(far, _sent(size, nodes))

    return Way(
        {what: Trip(hops(out), hops(back)[::-1]) for what, (out, back) in sizes.trips.items()},
        late=(),
        within=_sent(sizes.whole, node),
        between=_sent(sizes.whole, nodes),
    )


def _link(config: Config, neighbours: int) -> Resource:
    """The slowest between any two of so many ranks."""
    return "node" if in_nodes(config, neighbours) else "network"


def _sent(size: Fraction, members: int) -> Fraction:
    """The part of a tensor, exchanged among so many, that a rank sends: all but its own."""
    return size * (members - 1) / members
