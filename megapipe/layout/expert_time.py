"""How long a layer with experts takes, its exchanges and products on a device and its links, by
simulation (:mod:`megapipe.schedule.layer`); and in how many chunks it takes least.

Plans, the choice of ``experts.chunks=auto`` and ``scripts/experts.py simulate`` go by the same
steps. Experts are chosen evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.layout.dispatch import check_dispatch, most_chunks, with_dispatch
from megapipe.layout.expert_ways import OF_ROWS, PASSES, Hop, Pass, Trip, Way, ways
from megapipe.layout.layout import DeviceKind
from megapipe.layout.speeds import SPEED_KEYS, Speeds
from megapipe.model.interface import bytes_of
from megapipe.model.partition import StageSpec
from megapipe.schedule.layer.search import in_turns
from megapipe.schedule.layer.tasks import Resource, Step, What, chunked
from megapipe.schedule.layer.times import Timed


class Assumed(NamedTuple):
    """Assumptions beside the speeds of the configuration."""

    latency: float = 0.0
    """Seconds that an exchange of nothing takes."""
    copy_gb_s: float = 0.0
    """GB/s at which a device reads and writes rows while it orders them; 0: at once."""

    @classmethod
    def of(cls, config: Config) -> Assumed:
        """Those of a plan."""
        return cls(latency=config.parallel.latency_us / 1e6)


class LayerWork(NamedTuple):
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
        cls, config: Config, device: DeviceKind, speeds: Speeds, layer: int, assumed: Assumed
    ) -> LayerWork:
        """On a device of known speed. Raises :class:`ConfigError`."""
        parallel, train = config.parallel, config.train
        family = with_dispatch(config, "all_to_all", device)
        spec, rows = StageSpec(False, range(layer, layer + 1), False), train.microbatch
        length = train.sequence_length // parallel.cp
        flops = float(family.expert_flops(spec) * rows * length) / parallel.tp
        chosen = config.model.moe.top_k * parallel.etp
        moved = bytes_of(family.message(spec, rows, length)) * chosen
        return cls(
            experts=flops / speeds.reached,
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

    def late(self, way: Way) -> float:
        """Seconds in which W sends gradients."""
        return sum(step.seconds + step.latency for step in self._exchanges("combine", way.late))

    def _exchanges(self, what: What, hops: tuple[Hop, ...]) -> Iterator[Step]:
        for hop in hops:
            yield Step(what, hop.link, float(hop.bytes) / self.rates[hop.link], self.latency)


def trained(
    config: Config, device: DeviceKind, speeds: Speeds, layer: int, chunks: int
) -> dict[Pass, Timed]:
    """The passes of a layer whose experts are split over ranks, as a run does them in so many
    chunks; the dispatch is resolved and the device's peak known."""
    way = ways(config, device, layer)[config.experts.dispatch]
    work = LayerWork.of(config, device, speeds, layer, Assumed.of(config))
    return {
        what: _in_turns(tuple(work.steps(config.experts.dispatch, way.trips[what])), chunks)
        for what in PASSES
    }


@lru_cache(maxsize=256)
def _in_turns(steps: tuple[Step, ...], chunks: int) -> Timed:
    return in_turns(chunked(steps, chunks))


def alike(experts: Mapping[int, int]) -> dict[int, int]:
    """Of layers with so many experts each, one for every number, and how many have that number."""
    numbers = Counter(experts.values())
    return {layer: numbers[number] for number, layer in {n: i for i, n in experts.items()}.items()}


def resolved_chunks(config: Config, device: DeviceKind) -> int:
    """``experts.chunks`` without `auto`; the dispatch is resolved, and numbers of experts are
    checked."""
    experts, parallel = config.experts, config.parallel
    if experts.chunks != "auto":
        return experts.chunks
    if config.model.moe.experts is None or parallel.ep * parallel.etp == 1:
        return 1
    check_dispatch(config)
    speeds = Speeds.of(config)
    if speeds.tflops is None:
        raise ConfigError(
            "experts.chunks=auto goes by the speed of the device, which is not known: set "
            f"{SPEED_KEYS}, or experts.chunks to a number"
        )
    layers = alike(with_dispatch(config, experts.dispatch, device).experts())

    def seconds(chunks: int) -> float:
        """Of all layers."""
        return sum(
            number * timed.seconds
            for layer, number in layers.items()
            for timed in trained(config, device, speeds, layer, chunks).values()
        )

    return min(range(1, 1 + most_chunks(config)), key=seconds)
