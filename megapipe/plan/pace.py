"""How long a step takes, at speeds that are assumed.

Operations take the FLOPs of their stage at a share of the device's peak, and the collectives of
tensor parallelism on top, at the speed of a node's links or of the network; messages and what
replicas exchange travel beside them, as the simulator has it. Latencies, the update and what
operations wait for in memory are not in it but as far as the share of the peak is.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megapipe.config import Config
from megapipe.errors import ConfigError
from megapipe.layout import Layout
from megapipe.plan.buckets import BucketPlan, process_buckets, zero_stage
from megapipe.plan.chunks import most_tokens
from megapipe.plan.costs import scaled
from megapipe.plan.devices import device, local_device
from megapipe.plan.flops import layer_flops
from megapipe.plan.params import DTYPE_BYTES
from megapipe.plan.traffic import (
    Exchange,
    message_bytes,
    reduction,
    step_traffic,
)
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import pairs
from megapipe.schedule.simulate import Timeline, simulate


@dataclass(frozen=True)
class Speeds:
    """What is assumed of devices and links; None where nothing is known."""

    name: str | None
    """Of the device."""
    memory_gb: float | None
    tflops: float | None
    """Peak."""
    efficiency: float
    """Share of the peak that is reached."""
    link: float | None
    """Bytes per second of a device to others of its node."""
    network: float
    """Likewise, to other nodes."""
    node: int
    """Devices of a node."""

    @classmethod
    def of(cls, config: Config) -> "Speeds":
        """From the configuration, and where it says nothing from what is known of the device.

        Raises :class:`ConfigError` for a name of which nothing is known.
        """
        log, cpu = config.log, config.parallel.device == "cpu"
        name = log.device or (None if cpu else local_device())
        known = None if name is None else device(name)
        if log.device is not None and known is None:
            raise ConfigError(
                f"log.device={log.device} is not known: expected a common GPU, as in H100 or "
                "A100-SXM4-80GB, or null with log.device_gb, log.peak_tflops and log.link_gbs"
            )
        link = log.link_gbs or (known and known.link_gbs)
        return cls(
            name=name,
            memory_gb=log.device_gb or (known and known.memory_gb),
            tflops=log.peak_tflops or (known and known.tflops),
            efficiency=log.efficiency,
            link=None if link is None else link * 1e9,
            network=log.network_gbs * 1e9,
            node=log.node_devices,
        )

    def missing(self, layout: Layout) -> str | None:
        """The key without which there is no telling the time of a step."""
        if self.tflops is None:
            return "log.peak_tflops"
        if self.link is None and min(layout.world, self.node) > 1:
            return "log.link_gbs"
        return None

    def within(self, extent: int) -> float:
        """Bytes per second among `extent` neighbouring devices."""
        return self.network if extent > self.node or self.link is None else self.link


def expected(config: Config, layout: Layout, speeds: Speeds) -> Timeline:
    """A step as far as it is known: in seconds, or if a speed is missing at the FLOPs of the
    stages, where 1 is the forward of a layer."""
    if speeds.missing(layout):
        unit = layer_flops(config.model, config.train.sequence_length)
        return simulate(layout.schedule, scaled(layout.cost, 1 / unit))
    return simulate(layout.schedule, timed_cost(config, layout, speeds))


def timed_cost(config: Config, layout: Layout, speeds: Speeds) -> Cost:
    """Seconds of every operation, message, reduction and gathering of a step.

    The device's peak must be known, and its link where it is used.
    """
    assert speeds.tflops is not None
    tokens = config.train.sequence_length * config.train.microbatch
    rate = speeds.tflops * 1e12 * speeds.efficiency
    computed = scaled(layout.cost, tokens / layout.tp / rate)
    collectives = _collectives(config, layout, speeds)
    reduce, gather = _replicas(config, layout, speeds)
    stride = layout.tp * layout.cp * layout.dp

    def times(kind: Literal["F", "I", "W"]) -> tuple[float, ...]:
        own = computed.table(layout.stages)[Kind[kind]]
        return tuple(float(a) + b for a, b in zip(own, collectives[kind], strict=True))

    return replace(
        computed,
        F=times("F"),
        I=times("I"),
        W=times("W"),
        bandwidth={
            (a, b): _between(speeds, a * stride, b * stride)
            for a, b in pairs(layout.schedule.placement)
        },
        message=message_bytes(config, layout),
        reduce=tuple(reduce),
        gather=tuple(gather),
        zero=zero_stage(config.optimizer, layout.dp),
        prefetch=config.optimizer.prefetch,
        chunked_loss=most_tokens(config) > 0,
    )


def _collectives(config: Config, layout: Layout, speeds: Speeds) -> dict[str, list[float]]:
    """Seconds of the tp collectives of an operation on a whole micro-batch, by kind and stage.

    They are those of all stages of a rank, by layers; an end of the model has one or two of them
    where a layer has four. Those of a forward that is run again are with the forward.
    """
    schedule, rate = layout.schedule, speeds.within(layout.tp)
    result = {kind: [0.0] * layout.stages for kind in "FIW"}
    alone = config.pipeline.channels == "in_process"
    passed = [0.0] * len(schedule.placement.table)
    for microbatch in range(schedule.microbatches):
        passed[schedule.replica_of(microbatch)] += float(schedule.size_of(microbatch))
    for rank in range(1 if alone else layout.pp):
        weights: dict[int, float] = {}
        total = 0.0
        for row, microbatches in zip(schedule.placement.table, passed, strict=True):
            for stage, home in enumerate(row):
                if alone or home == rank:
                    spec = layout.stage_layers[stage]
                    weights[stage] = len(spec.layers) + (spec.embedding + spec.head) / 2
                    total += weights[stage] * microbatches
        for exchange in step_traffic(config, layout, rank):
            if exchange.axis == "tp" and exchange.what in result:
                for stage, weight in weights.items():
                    result[exchange.what][stage] += float(exchange.wire) / rate * weight / total
    return result


def _between(speeds: Speeds, first: int, second: int) -> float:
    """Bytes per second between the devices of two processes of the world."""
    same = first // speeds.node == second // speeds.node
    return speeds.within(1) if same else speeds.network


def _replicas(config: Config, layout: Layout, speeds: Speeds) -> tuple[list[float], list[float]]:
    """Seconds to reduce each stage's gradients once, and to gather its weights.

    A tied matrix, which is in no stage, is counted with the first of its stages on each process.
    """
    reduce, gather = [0.0] * layout.stages, [0.0] * layout.stages
    for rank in range(layout.pp):
        buckets = {bucket.stage: bucket for bucket in process_buckets(config, layout, rank)}
        tied = buckets.pop(layout.stages, None)
        for stage, bucket in buckets.items():
            both = _exchanged(config, layout, speeds, bucket)
            reduce[stage], gather[stage] = both
        if tied is not None:
            both = _exchanged(config, layout, speeds, tied)
            ends = [stage for stage in (0, layout.stages - 1) if stage in buckets]
            own = ends[0] if ends else 0
            reduce[own] = reduce[own] + both[0]
            gather[own] = gather[own] + both[1]
    return reduce, gather


def _exchanged(
    config: Config, layout: Layout, speeds: Speeds, bucket: BucketPlan
) -> tuple[float, float]:
    """Seconds of the bucket's reduction and of its gathering."""
    extent = layout.tp * layout.cp * layout.dp
    if "pp" in bucket.shard.axis + bucket.replicate.axis:
        extent *= layout.pp
    rate = speeds.within(extent)
    weights = bucket.numel * DTYPE_BYTES[config.model.dtype]
    gathered = Exchange("dp", "all_gather", "weights", 1, weights, bucket.shard.members).wire
    reduced = sum(exchange.wire for exchange in reduction(config, bucket, 1))
    return float(reduced) / rate, float(gathered) / rate
