"""Costs of every ``experts.dispatch`` in a layer, with every number and order of expert chunks."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.buckets import process_buckets
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.layout import Layout
from megapipe.layout.moe.dispatch import MOST_CHUNKS
from megapipe.layout.p2p import in_nodes
from megapipe.layout.speeds import Speeds
from megapipe.plan.moe.dispatch_traffic import dispatch_traffic
from megapipe.plan.moe.moe_layer_time import AssumedCosts, MoELayerTime
from megapipe.plan.step_time import exchanged, extent
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
    """An ``experts.dispatch`` with a number of chunks, and its costs per layer and micro-batch."""

    dispatch: str
    chunks: int
    order: str | None
    """Order of the expert chunks' steps: ``in_turns`` (as in training), one of :data:`RULES`, or
    ``searched``. ``any``: all orders take equally long. None with one chunk."""
    within: int
    """Bytes that a rank sends to other ranks of its node, forward and backward."""
    between: int
    """Bytes that a rank sends to other nodes, forward and backward."""
    seconds: Mapping[Pass, float]
    """Seconds per pass (forward, input gradient) from the first row permuted to the last one
    combined. With fetch, the input gradient includes the sends of the experts' gradients, although
    W makes them."""
    exposed: Mapping[Pass, float]
    """Seconds per pass in which the device computes nothing."""
    wait: float
    """Maximum seconds that a transfer of the input gradient waits for gradient buckets that are
    reduced over the same link."""

    @property
    def trained(self) -> bool:
        """Whether a run can use this dispatch and order."""
        return self.order in (None, ANY, IN_TURNS)

    @property
    def both(self) -> float:
        """Seconds of the forward and the input gradient together."""
        return sum(self.seconds.values())


def costs(units: Units, speeds: Speeds, layer: int, assumed: AssumedCosts) -> list[DispatchCost]:
    """Return the costs of all options, for a layer with experts on several ranks. The fastest
    option is first; ties go to fewer chunks. The device's peak must be known."""
    layout, work = units.layout, MoELayerTime.of(units, speeds, layer, assumed)
    link, bucket_seconds = _reductions(units.config, layout, layer)
    found = []
    for dispatch, traffic in dispatch_traffic(units, layer).items():
        late = {"F": 0.0, "I": work.late(traffic)}
        for chunks in range(1, 1 + min(MOST_CHUNKS, layout.model.experts()[layer] // layout.ep)):
            tasks = {
                what: chunked(list(work.steps(dispatch, traffic.trips[what])), chunks)
                for what in PASSES
            }
            orders = {rule: {p: by_rule(tasks[p], rule) for p in PASSES} for rule in RULES}
            orders[IN_TURNS] = {p: training_order(tasks[p]) for p in PASSES}
            orders[SEARCHED] = {p: fastest(tasks[p]) for p in PASSES}
            for order, timed in _orders_to_list(orders, chunks).items():
                found.append(
                    DispatchCost(
                        dispatch=dispatch,
                        chunks=chunks,
                        order=order,
                        within=round(traffic.intra_node_bytes),
                        between=round(traffic.inter_node_bytes),
                        seconds={what: timed[what].seconds + late[what] for what in PASSES},
                        exposed={what: timed[what].exposed + late[what] for what in PASSES},
                        wait=with_reductions(timed["I"], link, bucket_seconds).longest_wait,
                    )
                )
    return sorted(found, key=lambda cost: (cost.both, cost.chunks, cost.between, cost.within))


def _orders_to_list(
    orders: Mapping[str, Mapping[Pass, TimedTasks]], chunks: int
) -> dict[str | None, Mapping[Pass, TimedTasks]]:
    """Select the orders to list: that of training, those of rules that take another time, and the
    searched order if it is the fastest."""
    if chunks == 1:
        return {None: orders[IN_TURNS]}
    seconds = {name: sum(t.seconds for t in timed.values()) for name, timed in orders.items()}
    trained = seconds[IN_TURNS]
    distinct: dict[str | None, Mapping[Pass, TimedTasks]] = {IN_TURNS: orders[IN_TURNS]}
    distinct |= {rule: orders[rule] for rule in RULES if not isclose(seconds[rule], trained)}
    if seconds[SEARCHED] < (1 - 1e-9) * min(trained, *(seconds[rule] for rule in RULES)):
        distinct[SEARCHED] = orders[SEARCHED]
    return distinct if len(distinct) > 1 else {ANY: orders[IN_TURNS]}


def _reductions(config: Config, layout: Layout, layer: int) -> tuple[Resource, list[float]]:
    """Return the link of the gradient reductions that may coincide with the layer's exchanges, and
    each bucket's seconds. First come expert buckets of the rank's other stages, whose backward may
    be over, then dense buckets of the layer's stage."""
    (stage,) = (n for n, spec in enumerate(layout.stage_layers) if layer in spec.layers)
    rank = layout.schedule.placement.rank_of(stage)
    buckets = [
        bucket
        for bucket in process_buckets(config, layout, 0 if layout.in_process else rank)
        if bucket.stage < layout.stages
        and bucket.over_ep == (bucket.stage != stage)
        and not (bucket.frozen or bucket.slots)
    ]
    buckets.sort(key=lambda bucket: not bucket.over_ep)
    near = all(in_nodes(config, extent(layout, bucket)) for bucket in buckets)
    return "node" if near else "network", [exchanged(config, layout, b)[0] for b in buckets]
