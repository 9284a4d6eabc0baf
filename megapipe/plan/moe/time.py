"""How long a layer with experts takes, its exchanges and products on a device and its links, by
simulation (:mod:`megapipe.schedule.moe_layer`); and in how many chunks it takes least.

Plans, the choice of ``experts.chunks=auto`` and ``scripts/experts.py simulate`` use the same steps.
Experts are chosen evenly.
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
from megapipe.layout.speeds import Speeds, known_speeds
from megapipe.plan.moe.ways import (
    OF_ROWS,
    DispatchTraffic,
    LinkBytes,
    PassTraffic,
    is_of_experts,
    way_of,
)
from megapipe.plan.unit import SPLIT, Kernel, Transfer
from megapipe.plan.units import Units
from megapipe.schedule.moe_layer.search import training_order
from megapipe.schedule.moe_layer.tasks import Resource, Step, What, chunked
from megapipe.schedule.moe_layer.times import TimedTasks
from megapipe.util.user_code import is_user_code


class AssumedCosts(NamedTuple):
    """Assumptions beside the speeds of the configuration."""

    latency: float = 0.0
    """Seconds that an exchange of nothing takes."""
    copy_gb_s: float = 0.0
    """GB/s at which a device reads and writes rows while it orders them; 0: at once."""

    @classmethod
    def of(cls, config: Config) -> AssumedCosts:
        """Take the assumptions of a plan."""
        return cls(latency=config.parallel.latency_us / 1e6)


class Products(NamedTuple):
    """Products of the experts of a rank in the forward of a layer."""

    flops: int
    rows: int
    bytes: int
    """Bytes of the results of all rows."""

    @classmethod
    def of(cls, units: Units, layer: int) -> Products:
        """Products between the first rows that come and the last results that leave: for each
        expert a first one, and then for each the one that gives results. A dense MLP beside the
        experts comes later."""
        calls = units.of_layer(layer, "all_to_all").operations["F"]
        sent = (isinstance(call, Transfer) and is_of_experts(call) for call in calls)
        first, *_, last = (at for at, is_sent in enumerate(sent) if is_sent)
        own = [call for call in calls[first:last] if isinstance(call, Kernel) and call.product]
        results = own[len(own) // 2 :]
        return cls(
            flops=sum(call.flops for call in own),
            rows=sum(call.product[0] for call in results if call.product),
            bytes=sum(call.written for call in results),
        )


class MoELayerTime(NamedTuple):
    """Times of the rows of a layer on a device and its links."""

    experts: float
    """Seconds of the products of a forward; those of an input gradient are as many."""
    ordering: float
    """Seconds to order the rows once."""
    latency: float
    rates: Mapping[Resource, float]
    """Bytes per second of the links."""

    @classmethod
    def of(cls, units: Units, speeds: Speeds, layer: int, assumed: AssumedCosts) -> MoELayerTime:
        """On a device of known speed. Raises :class:`ConfigError`."""
        products, parallel = Products.of(units, layer), units.config.parallel
        moved = 2 * products.bytes  # read and written
        return cls(
            experts=products.flops / speeds.reached,
            ordering=moved / (1e9 * assumed.copy_gb_s) if assumed.copy_gb_s else 0.0,
            latency=assumed.latency,
            rates={"node": 1e9 * parallel.node_gb_s, "network": 1e9 * parallel.network_gb_s},
        )

    def steps(self, dispatch: str, trip: PassTraffic) -> Iterator[Step]:
        """List the steps of a pass."""
        if self.ordering and (dispatch in OF_ROWS or is_user_code(dispatch)):
            yield Step("encode", "compute", self.ordering)
        for step in self._exchanges("dispatch", trip.out):
            yield step._replace(at_once=dispatch == "all_gather")
        if self.ordering:
            yield Step("decode", "compute", self.ordering)
        yield Step("experts", "compute", self.experts)
        yield from self._exchanges("combine", trip.back)

    def late(self, way: DispatchTraffic) -> float:
        """Return the seconds in which W sends gradients."""
        return sum(
            step.seconds + step.latency for step in self._exchanges("combine", way.weight_grad_hops)
        )

    def _exchanges(self, what: What, hops: tuple[LinkBytes, ...]) -> Iterator[Step]:
        for hop in hops:
            yield Step(what, hop.link, float(hop.bytes) / self.rates[hop.link], self.latency)


def training_passes(
    units: Units, speeds: Speeds, layer: int, dispatch: str, chunks: int
) -> dict[Pass, TimedTasks]:
    """Simulate the passes of a layer whose experts are split over ranks, as a run does them under a
    form of ``experts.dispatch`` in a number of chunks; the device's peak is known."""
    way = way_of(units, layer, dispatch)
    work = MoELayerTime.of(units, speeds, layer, AssumedCosts.of(units.config))
    return {
        what: _in_turns(tuple(work.steps(dispatch, way.trips[what])), chunks) for what in PASSES
    }


@lru_cache(maxsize=256)
def _in_turns(steps: tuple[Step, ...], chunks: int) -> TimedTasks:
    return training_order(chunked(steps, chunks))


def alike(experts: Mapping[int, int]) -> dict[int, int]:
    """Find one layer for every number of `experts` of a layer, and how many layers have it."""
    numbers = Counter(experts.values())
    return {layer: numbers[number] for number, layer in {n: i for i, n in experts.items()}.items()}


def chosen_form(config: Config, layout: Layout, units: Units | None = None) -> ExpertForm:
    """Choose the form of fewest bytes for ``experts.dispatch=auto``, and for
    ``experts.chunks=auto`` the number that is fastest, on a device of known speed. `units` are
    those of the layout, if there are some."""
    units = units or Units(config, layout)
    dispatch: str = config.experts.dispatch
    layers = alike(layout.model.experts())

    def size(form: str) -> int:
        """Add up the bytes of all layers, forward and backward."""
        return sum(number * _bytes(units, layer, form) for layer, number in layers.items())

    def seconds(chunks: int) -> float:
        """Add up the time of all layers, forward and backward."""
        return sum(
            number * timed.seconds
            for layer, number in layers.items()
            for timed in training_passes(units, speeds, layer, dispatch, chunks).values()
        )

    if dispatch == "auto":
        dispatch = min(dispatch_candidates(config), key=size)
    if config.experts.chunks != "auto":
        return ExpertForm(dispatch, config.experts.chunks)
    speeds = known_speeds(config)
    return ExpertForm(dispatch, min(range(1, 1 + most_chunks(config)), key=seconds))


def _bytes(units: Units, layer: int, form: str) -> int:
    """Count the bytes that the ranks of experts exchange, numbers of rows included."""
    unit = units.of_layer(layer, form)
    every = (each for what in SPLIT for each in unit.transfers(what))
    return sum(each.bytes for each in every if each.axis.startswith("ep"))
