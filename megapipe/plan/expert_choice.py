"""Every way to exchange rows with experts, in chunks and orders, with what it costs in a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose
from typing import NamedTuple

from megapipe.config import Config
from megapipe.layout.layout import Layout
from megapipe.layout.links import in_nodes
from megapipe.model.interface import bytes_of
from megapipe.model.partition import StageSpec
from megapipe.plan.buckets import process_buckets
from megapipe.plan.expert_traffic import OF_ROWS, PASSES, Hop, Pass, Trip, ways
from megapipe.plan.pace import exchanged, extent
from megapipe.plan.speeds import Speeds
from megapipe.schedule.layer.search import RULES, by_rule, fastest, in_turns, with_reductions
from megapipe.schedule.layer.tasks import Resource, Step, What, chunked
from megapipe.schedule.layer.times import Timed

MOST_CHUNKS = 8
ANY, IN_TURNS, SEARCHED = "any", "in_turns", "searched"


class Assumed(NamedTuple):
    """Assumptions beside the speeds of the configuration."""

    latency: float = 0.0
    """Seconds that an exchange of nothing takes."""
    copy_gb_s: float = 0.0
    """GB/s at which a device reads and writes rows while it orders them; 0: at once."""


class Cost(NamedTuple):
    """A way, and its costs of one layer and micro-batch."""

    dispatch: str
    chunks: int
    order: str | None
    """in_turns, as in training, one of :data:`RULES`, or searched; any where all are equal, and
    None with one chunk."""
    within: int
    """Bytes that a rank sends to others of its node, forward and backward."""
    between: int
    """The same to other nodes."""
    seconds: Mapping[Pass, float]
    """From the first row ordered to the last one back, forward and input gradient."""
    exposed: Mapping[Pass, float]
    """Of these those in which nothing is computed."""
    wait: float
    """The longest that an exchange of the input gradient waits for dense gradients, if these are
    reduced meanwhile."""

    @property
    def trained(self) -> bool:
        """Whether a run does it so."""
        return self.order in (None, ANY, IN_TURNS)

    @property
    def both(self) -> float:
        """Seconds of both passes."""
        return sum(self.seconds.values())


def costs(
    config: Config, layout: Layout, speeds: Speeds, layer: int, assumed: Assumed
) -> list[Cost]:
    """All ways of a layer whose experts are split over several ranks, the fastest first and of
    equal ones that with fewest chunks. The device's peak must be known."""
    work = _Work.of(config, layout, speeds, layer, assumed)
    link, pieces = _reductions(config, layout, layer)
    found = []
    for dispatch, way in ways(config, layout, layer).items():
        for chunks in range(1, 1 + min(MOST_CHUNKS, layout.model.experts()[layer] // layout.ep)):
            tasks = {
                what: chunked(list(work.steps(dispatch, way.trips[what])), chunks)
                for what in PASSES
            }
            orders = {rule: {p: by_rule(tasks[p], rule) for p in PASSES} for rule in RULES}
            orders[IN_TURNS] = {p: in_turns(tasks[p]) for p in PASSES}
            orders[SEARCHED] = {p: fastest(tasks[p]) for p in PASSES}
            for order, timed in _worth_telling(orders, chunks).items():
                found.append(
                    Cost(
                        dispatch=dispatch,
                        chunks=chunks,
                        order=order,
                        within=round(way.within),
                        between=round(way.between),
                        seconds={what: timed[what].seconds for what in PASSES},
                        exposed={what: timed[what].exposed for what in PASSES},
                        wait=with_reductions(timed["I"], link, pieces).longest_wait,
                    )
                )
    return sorted(found, key=lambda cost: (cost.both, cost.chunks, cost.between, cost.within))


def _worth_telling(
    orders: Mapping[str, Mapping[Pass, Timed]], chunks: int
) -> dict[str | None, Mapping[Pass, Timed]]:
    """That of training and others that differ from it; a searched one that is better than any."""
    if chunks == 1:
        return {None: orders[IN_TURNS]}
    seconds = {name: sum(t.seconds for t in timed.values()) for name, timed in orders.items()}
    trained = seconds[IN_TURNS]
    told: dict[str | None, Mapping[Pass, Timed]] = {IN_TURNS: orders[IN_TURNS]}
    told |= {rule: orders[rule] for rule in RULES if not isclose(seconds[rule], trained)}
    if seconds[SEARCHED] < (1 - 1e-9) * min(trained, *(seconds[rule] for rule in RULES)):
        told[SEARCHED] = orders[SEARCHED]
    return told if len(told) > 1 else {ANY: orders[IN_TURNS]}


class _Work(NamedTuple):
    """Times of the rows of a layer on a device and its links."""

    experts: float
    """Seconds of the products of a forward; those of an input gradient are as many."""
    ordering: float
    """Seconds to order the rows once."""
    latency: float
    rates: Mapping[Resource, float]
    """Bytes per second of the links."""

    @classmethod
    def of(
        cls, config: Config, layout: Layout, speeds: Speeds, layer: int, assumed: Assumed
    ) -> _Work:
        assert speeds.tflops is not None
        parallel, chosen = config.parallel, config.model.moe.top_k
        spec, rows = StageSpec(False, range(layer, layer + 1), False), config.train.microbatch
        flops = layout.model.expert_flops(spec) * rows * layout.local_length / layout.tp
        moved = (
            bytes_of(layout.model.message(spec, rows, layout.local_length)) * chosen * layout.etp
        )
        return cls(
            experts=flops / (speeds.tflops * 1e12 * speeds.efficiency),
            ordering=2 * moved / (1e9 * assumed.copy_gb_s) if assumed.copy_gb_s else 0.0,
            latency=assumed.latency,
            rates={"node": 1e9 * parallel.node_gb_s, "network": 1e9 * parallel.network_gb_s},
        )

    def steps(self, dispatch: str, trip: Trip) -> Iterator[Step]:
        """The steps of a pass."""
        if self.ordering and dispatch in OF_ROWS:
            yield Step("encode", "compute", self.ordering)
        for step in self._exchanges("dispatch", trip.out):
            yield step._replace(at_once=dispatch == "all_gather")
        if self.ordering:
            yield Step("decode", "compute", self.ordering)
        yield Step("experts", "compute", self.experts)
        yield from self._exchanges("combine", trip.back)

    def _exchanges(self, what: What, hops: tuple[Hop, ...]) -> Iterator[Step]:
        for hop in hops:
            yield Step(what, hop.link, float(hop.bytes) / self.rates[hop.link], self.latency)


def _reductions(config: Config, layout: Layout, layer: int) -> tuple[Resource, list[float]]:
    """The link over which the dense gradients of a layer's stage are reduced, and the seconds of
    each piece."""
    (stage,) = (n for n, spec in enumerate(layout.stage_layers) if layer in spec.layers)
    rank = layout.schedule.placement.rank_of(stage)
    pieces = [
        bucket
        for bucket in process_buckets(config, layout, 0 if layout.in_process else rank)
        if bucket.stage == stage and not (bucket.experts or bucket.frozen)
    ]
    near = all(in_nodes(config, extent(layout, bucket)) for bucket in pieces)
    return "node" if near else "network", [exchanged(config, layout, b)[0] for b in pieces]
