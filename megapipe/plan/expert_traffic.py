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
back count as equal halves: they differ by the 4 bytes of a row's weight. The gradients of fetched
experts, which W sends, are counted with I.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Literal, NamedTuple

from megapipe.config import Config
from megapipe.layout.dispatch import BY_BYTES, with_dispatch
from megapipe.layout.layout import Layout
from megapipe.layout.links import in_nodes
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
    within: Fraction
    """Bytes that a rank sends to others of its node, forward and backward."""
    between: Fraction
    """The same to other nodes; where nodes have other parts of a group each, the most."""


class _Sizes(NamedTuple):
    """Bytes of the whole tensors that go out and back."""

    out: Fraction
    back: Fraction


def ways(config: Config, layout: Layout, layer: int) -> dict[str, Way]:
    """All ways of a layer whose experts are split over several ranks, by name."""
    ranks = layout.expert_ranks
    link: Resource = "node" if in_nodes(config, ranks) else "network"
    beside = min(_beside(config, layout, rank) for rank in range(layout.world))
    sizes = _sizes(config, layout, layer)
    found = {name: _one_hop(each, link, ranks, beside) for name, each in sizes.items()}
    if ranks > beside > 1 and ranks % beside == 0:
        found["hierarchical"] = _two_hops(sizes["all_to_all"], beside, ranks // beside)
    return found


def _beside(config: Config, layout: Layout, rank: int) -> int:
    """Of the ranks with which a rank shares experts, those on its node; it is one of them."""
    ranks, per_node = layout.expert_ranks, config.parallel.per_node
    group, node = rank // ranks * ranks, rank // per_node * per_node
    return min(group + ranks, node + per_node) - max(group, node)


def _sizes(config: Config, layout: Layout, layer: int) -> dict[str, Mapping[Pass, _Sizes]]:
    """By name, but for the one in two hops, which has the sizes of one hop twice."""
    spec, rows = StageSpec(False, range(layer, layer + 1), False), config.train.microbatch
    found: dict[str, Mapping[Pass, _Sizes]] = {}
    for form in BY_BYTES:
        family = with_dispatch(config, form, layout.device)
        sent: Counter[tuple[str, Collective]] = Counter()
        for each in family.token_traffic(spec, (), rows, sum(layout.slice_lengths), again=False):
            if each.among == "ep":
                sent["I" if each.what == "W" else each.what, each.collective] += each.bytes
        found[form] = {what: _halves(sent, what) for what in PASSES}
    return found


def _halves(sent: Mapping[tuple[str, Collective], int], what: Pass) -> _Sizes:
    gathered = sent.get((what, "all_gather"), 0)
    back = sent.get((what, "all_to_all"), 0) + sent.get((what, "reduce_scatter"), 0)
    if not gathered:  # rows go both ways
        return _Sizes(Fraction(back, 2), Fraction(back, 2))
    return _Sizes(Fraction(gathered), Fraction(back))


def _one_hop(sizes: Mapping[Pass, _Sizes], link: Resource, ranks: int, beside: int) -> Way:
    """As much to each of the ranks, all over the slowest link between any two."""

    def hops(size: Fraction) -> tuple[Hop, ...]:
        return (Hop(link, _sent(size, ranks)),) if size else ()

    whole = sum(sum(each) for each in sizes.values())
    return Way(
        {what: Trip(hops(each.out), hops(each.back)) for what, each in sizes.items()},
        within=Fraction(whole) * (beside - 1) / ranks,
        between=Fraction(whole) * (ranks - beside) / ranks,
    )


def _two_hops(sizes: Mapping[Pass, _Sizes], node: int, nodes: int) -> Way:
    """Within nodes of `node` ranks, and between `nodes` of them."""

    def hops(size: Fraction) -> tuple[Hop, Hop]:
        return Hop("node", _sent(size, node)), Hop("network", _sent(size, nodes))

    whole = Fraction(sum(sum(each) for each in sizes.values()))
    trips = {what: Trip(hops(each.out), hops(each.back)[::-1]) for what, each in sizes.items()}
    return Way(trips, within=_sent(whole, node), between=_sent(whole, nodes))


def _sent(size: Fraction, members: int) -> Fraction:
    """The part of a tensor, exchanged among so many, that a rank sends: all but its own."""
    return size * (members - 1) / members
