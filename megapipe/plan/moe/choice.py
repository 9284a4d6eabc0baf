"""Every way to exchange rows with experts, in chunks and orders, with what it costs in a layer."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.buckets import process_buckets
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.layout import Layout
from megapipe.layout.links import in_nodes
from megapipe.layout.moe.dispatch import MOST_CHUNKS
from megapipe.layout.speeds import Speeds
from megapipe.plan.moe.time import AssumedCosts, MoELayerTime
from megapipe.plan.moe.ways import dispatch_traffic
from megapipe.plan.pace import exchanged, extent
from megapipe.plan.units import Units
from megapipe.schedule.moe_layer.search import (
    RULES,
    by_rule,
    fastest,
    training_order,
    with_reductions,
)
from megapipe.schedule.moe_layer.tasks import Resource, chunked
from megapipe.schedule.moe_layer.times import TimedTasks

ANY, IN_TURNS, SEARCHED = "any", "in_turns", "searched"


class DispatchCost(NamedTuple):
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
    """From the first row ordered to the last one back, forward and input gradient, and with this
    the gradients of fetched experts, which W sends."""
    exposed: Mapping[Pass, float]
    """Of these those in which nothing is computed."""
    wait: float
    """The longest that an exchange of the input gradient waits for gradients, if these are reduced
    meanwhile."""

    @property
    def trained(self) -> bool:
        """Whether a run does it so."""
        return self.order in (None, ANY, IN_TURNS)

    @property
    def both(self) -> float:
        """Seconds of both passes."""
        return sum(self.seconds.values())


def costs(units: Units, speeds: Speeds, layer: int, assumed: AssumedCosts) -> list[DispatchCost]:
    """All ways of a layer whose experts are split over several ranks, the fastest first and of
    equal ones that with fewest chunks. The device's peak must be known."""
    layout, work = units.layout, MoELayerTime.of(units, speeds, layer, assumed)
    link, pieces = _reductions(units.config, layout, layer)
    found = []
    for dispatch, way in dispatch_traffic(units, layer).items():
        late = {"F": 0.0, "I": work.late(way)}
        for chunks in range(1, 1 + min(MOST_CHUNKS, layout.model.experts()[layer] // layout.ep)):
            tasks = {
                what: chunked(list(work.steps(dispatch, way.trips[what])), chunks)
                for what in PASSES
            }
            orders = {rule: {p: by_rule(tasks[p], rule) for p in PASSES} for rule in RULES}
            orders[IN_TURNS] = {p: training_order(tasks[p]) for p in PASSES}
            orders[SEARCHED] = {p: fastest(tasks[p]) for p in PASSES}
            for order, timed in _worth_telling(orders, chunks).items():
                found.append(
                    DispatchCost(
                        dispatch=dispatch,
                        chunks=chunks,
                        order=order,
                        within=round(way.intra_node_bytes),
                        between=round(way.inter_node_bytes),
                        seconds={what: timed[what].seconds + late[what] for what in PASSES},
                        exposed={what: timed[what].exposed + late[what] for what in PASSES},
                        wait=with_reductions(timed["I"], link, pieces).longest_wait,
                    )
                )
    return sorted(found, key=lambda cost: (cost.both, cost.chunks, cost.between, cost.within))


def _worth_telling(
    orders: Mapping[str, Mapping[Pass, TimedTasks]], chunks: int
) -> dict[str | None, Mapping[Pass, TimedTasks]]:
    """That of training and others that differ from it; a searched one that is better than any."""
    if chunks == 1:
        return {None: orders[IN_TURNS]}
    seconds = {name: sum(t.seconds for t in timed.values()) for name, timed in orders.items()}
    trained = seconds[IN_TURNS]
    told: dict[str | None, Mapping[Pass, TimedTasks]] = {IN_TURNS: orders[IN_TURNS]}
    told |= {rule: orders[rule] for rule in RULES if not isclose(seconds[rule], trained)}
    if seconds[SEARCHED] < (1 - 1e-9) * min(trained, *(seconds[rule] for rule in RULES)):
        told[SEARCHED] = orders[SEARCHED]
    return told if len(told) > 1 else {ANY: orders[IN_TURNS]}


def _reductions(config: Config, layout: Layout, layer: int) -> tuple[Resource, list[float]]:
    """The link over which gradients are reduced that a layer's exchanges may meet, and the seconds
    of each piece: those of the experts of another stage of the rank, whose backward may be over,
    all at once, and dense ones of the layer's own stage."""
    (stage,) = (n for n, spec in enumerate(layout.stage_layers) if layer in spec.layers)
    rank = layout.schedule.placement.rank_of(stage)
    pieces = [
        bucket
        for bucket in process_buckets(config, layout, 0 if layout.in_process else rank)
        if bucket.stage < layout.stages
        and bucket.over_ep == (bucket.stage != stage)
        and not (bucket.frozen or bucket.slots)
    ]
    pieces.sort(key=lambda bucket: not bucket.over_ep)
    near = all(in_nodes(config, extent(layout, bucket)) for bucket in pieces)
    return "node" if near else "network", [exchanged(config, layout, b)[0] for b in pieces]
