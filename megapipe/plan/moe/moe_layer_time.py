"""Simulated time of an MoE layer on a device and its links (:mod:`megapipe.schedule.moe_layer`),
and the number of expert chunks with which it is fastest.

Plans, ``experts.overlap_chunks=auto`` and ``scripts/experts.py simulate`` use this simulation. It
assumes that experts are chosen evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.layout import Layout
from megapipe.layout.measurements import ExpertForm
from megapipe.layout.moe.dispatch import dispatch_candidates, most_chunks
from megapipe.layout.p2p import link_latency, link_speed
from megapipe.layout.speeds import Speeds, known_speeds
from megapipe.plan.kernel_time import KernelTime
from megapipe.plan.moe.dispatch_traffic import (
    OF_ROWS,
    DispatchTraffic,
    LinkBytes,
    PassTraffic,
    is_of_experts,
    traffic_of,
)
from megapipe.plan.unit import SPLIT, Kernel, Transfer
from megapipe.plan.units import Units
from megapipe.schedule.moe_layer.search import training_order
from megapipe.schedule.moe_layer.tasks import Resource, Step, What, chunked
from megapipe.schedule.moe_layer.times import TimedTasks
from megapipe.util.user_code import is_user_code


class AssumedCosts(NamedTuple):
    """Costs that the simulation assumes besides the configured speeds."""

    latency: float = 0.0
    """Seconds that a transfer without bytes takes."""
    copy_gb_s: float = 0.0
    """GB/s at which a device reads and writes rows to permute them; 0: no time."""

    @classmethod
    def of(cls, config: Config) -> AssumedCosts:
        """Return the costs that a plan assumes."""
        return cls(latency=link_latency(config))


class Products(NamedTuple):
    """Matrix products of a rank's routed experts in the forward of a layer."""

    kernels: tuple[Kernel, ...]
    rows: int
    bytes: int
    """Bytes of the experts' outputs for all rows."""

    @classmethod
    def of(cls, units: Units, layer: int) -> Products:
        """Count the products of routed experts between dispatch and combine: first every expert's
        up projection, then every expert's down projection. The shared expert is left out."""
        calls = units.of_layer(layer, "all_to_all").operations["F"]
        sent = (isinstance(call, Transfer) and is_of_experts(call) for call in calls)
        first, *_, last = (at for at, is_sent in enumerate(sent) if is_sent)
        own = [call for call in calls[first:last] if isinstance(call, Kernel) and call.product]
        results = own[len(own) // 2 :]
        return cls(
            kernels=tuple(own),
            rows=sum(call.product[0] for call in results if call.product),
            bytes=sum(call.written for call in results),
        )


class MoELayerTime(NamedTuple):
    """Durations and link speeds from which an MoE layer is simulated."""

    experts: float
    """Seconds of the experts' products in a forward; an input gradient takes equally long."""
    ordering: float
    """Seconds to permute the rows once."""
    latency: float
    rates: Mapping[Resource, float]
    """Bytes per second, by kind of link."""

    @classmethod
    def of(cls, units: Units, speeds: Speeds, layer: int, assumed: AssumedCosts) -> MoELayerTime:
        """Compute the durations; raise :class:`ConfigError` if the device's speed is unknown."""
        products, config = Products.of(units, layer), units.config
        moved = 2 * products.bytes  # read and written
        return cls(
            experts=KernelTime(speeds).of(products.kernels).seconds,
            ordering=moved / (1e9 * assumed.copy_gb_s) if assumed.copy_gb_s else 0.0,
            latency=assumed.latency,
            rates={
                "node": 1e9 * link_speed(config, within=True),
                "network": 1e9 * link_speed(config, within=False),
            },
        )

    def steps(self, dispatch: str, trip: PassTraffic) -> Iterator[Step]:
        """Yield the steps of a pass: permute, dispatch, unpermute, experts, combine."""
        if self.ordering and (dispatch in OF_ROWS or is_user_code(dispatch)):
            yield Step("encode", "compute", self.ordering)
        for step in self._exchanges("dispatch", trip.out):
            yield step._replace(at_once=dispatch == "all_gather")
        if self.ordering:
            yield Step("decode", "compute", self.ordering)
        yield Step("experts", "compute", self.experts)
        yield from self._exchanges("combine", trip.back)

    def late(self, traffic: DispatchTraffic) -> float:
        """Return the seconds in which W sends gradients of fetched experts."""
        return sum(
            step.seconds + step.latency
            for step in self._exchanges("combine", traffic.weight_grad_hops)
        )

    def _exchanges(self, what: What, hops: tuple[LinkBytes, ...]) -> Iterator[Step]:
        for hop in hops:
            yield Step(what, hop.link, float(hop.bytes) / self.rates[hop.link], self.latency)


def training_passes(
    units: Units, speeds: Speeds, layer: int, dispatch: str, chunks: int
) -> dict[Pass, TimedTasks]:
    """Simulate forward and input gradient of a layer whose experts are split over ranks, in the
    order of training, in `chunks` expert chunks. The device's peak must be known."""
    traffic = traffic_of(units, layer, dispatch)
    work = MoELayerTime.of(units, speeds, layer, AssumedCosts.of(units.config))
    return {
        what: _in_turns(tuple(work.steps(dispatch, traffic.trips[what])), chunks) for what in PASSES
    }


@lru_cache(maxsize=256)
def _in_turns(steps: tuple[Step, ...], chunks: int) -> TimedTasks:
    return training_order(chunked(steps, chunks))


def alike(experts: Mapping[int, int]) -> dict[int, int]:
    """Group layers by their number of experts: {one layer of each group: size of the group}."""
    numbers = Counter(experts.values())
    return {layer: numbers[number] for number, layer in {n: i for i, n in experts.items()}.items()}


def chosen_form(config: Config, layout: Layout, units: Units | None = None) -> ExpertForm:
    """Choose for ``experts.dispatch=auto`` the mode that sends fewest bytes, and for
    ``experts.overlap_chunks=auto`` the fastest number of chunks, on a device of known speed.
    `units`: the layout's measured costs, if they exist already."""
    units = units or Units(config, layout)
    dispatch: str = config.experts.dispatch
    layers = alike(layout.model.experts())

    def size(form: str) -> int:
        """Return the bytes that all layers send, forward and backward."""
        return sum(number * _bytes(units, layer, form) for layer, number in layers.items())

    def seconds(chunks: int) -> float:
        """Return the simulated time of all layers, forward and backward."""
        return sum(
            number * timed.seconds
            for layer, number in layers.items()
            for timed in training_passes(units, speeds, layer, dispatch, chunks).values()
        )

    if dispatch == "auto":
        dispatch = min(dispatch_candidates(config), key=size)
    if config.experts.overlap_chunks != "auto":
        return ExpertForm(dispatch, config.experts.overlap_chunks)
    speeds = known_speeds(config)
    return ExpertForm(dispatch, min(range(1, 1 + most_chunks(config)), key=seconds))


def _bytes(units: Units, layer: int, form: str) -> int:
    """Return the bytes that expert-parallel ranks exchange in a layer, row counts included."""
    unit = units.of_layer(layer, form)
    every = (each for what in SPLIT for each in unit.transfers(what))
    return sum(each.bytes for each in every if each.axis.startswith("ep"))
