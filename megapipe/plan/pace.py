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
from megapipe.plan.links import speed
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

_WAITING = {"F": "F", "I": "I", "W": "W", "messages": "FI"}
"""Operations that wait for a tp collective, by what it is for."""


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
                "A100-SXM4-80GB, or null with log.device_gb and log.peak_tflops"
            )
        return cls(
            name=name,
            memory_gb=log.device_gb or (known and known.memory_gb),
            tflops=log.peak_tflops or (known and known.tflops),
            efficiency=log.efficiency,
        )


def expected(config: Config, layout: Layout, speeds: Speeds) -> Timeline:
    """A step as far as it is known: in seconds, or if a speed is missing at the FLOPs of the
    stages, where 1 is the forward of a layer."""
    if speeds.tflops is None:
        unit = layer_flops(config.model, config.train.sequence_length)
        return simulate(layout.schedule, scaled(layout.cost, 1 / unit))
    return simulate(layout.schedule, timed_cost(config, layout, speeds))


def timed_cost(config: Config, layout: Layout, speeds: Speeds) -> Cost:
    """Seconds of every operation, message, reduction and gathering of a step.

    The device's peak must be known.
    """
    assert speeds.tflops is not None
    tokens = config.train.sequence_length * config.train.microbatch
    rate = speeds.tflops * 1e12 * speeds.efficiency
    computed = scaled(layout.cost, tokens / layout.tp / rate)
    collectives = _collectives(config, layout)
    reduce, gather = _replicas(config, layout)
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
            (a, b): _between(config, a * stride, b * stride)
            for a, b in pairs(layout.schedule.placement)
        },
        message=message_bytes(config, layout),
        reduce=tuple(reduce),
        gather=tuple(gather),
        zero=zero_stage(config.optimizer, layout.dp),
        prefetch=config.optimizer.prefetch,
        chunked_loss=most_tokens(config) > 0,
    )


def _collectives(config: Config, layout: Layout) -> dict[str, list[float]]:
    """Seconds of the tp collectives of an operation on a whole micro-batch, by kind and stage.

    They are those of all stages of a rank, by layers; an end of the model has one or two of them
    where a layer has four. Those of a forward that is run again are with the forward.
    """
    schedule, rate = layout.schedule, 1e9 * speed(config, layout.tp)
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
            kinds = _WAITING.get(exchange.what, "") if exchange.axis == "tp" else ""
            for kind in kinds:
                seconds = float(exchange.wire) / rate / len(kinds)
                for stage, weight in weights.items():
                    holders = 1 if alone else len(schedule.placement.holders(stage))
                    result[kind][stage] += seconds * weight / total / holders
    return result


def _between(config: Config, first: int, second: int) -> float:
    """Bytes per second between two processes of the world."""
    parallel = config.parallel
    same = first // parallel.per_node == second // parallel.per_node
    return 1e9 * (parallel.node_gb_s if same else parallel.network_gb_s)


def _replicas(config: Config, layout: Layout) -> tuple[list[float], list[float]]:
    """Seconds to reduce each stage's gradients once, and to gather its weights.

    A tied matrix, which is in no stage, is counted with the first of its stages on each process.
    """
    reduce, gather = [0.0] * layout.stages, [0.0] * layout.stages
    for rank in range(layout.pp):
        buckets = {bucket.stage: bucket for bucket in process_buckets(config, layout, rank)}
        tied = buckets.pop(layout.stages, None)
        for stage, bucket in buckets.items():
            both = _exchanged(config, layout, bucket)
            reduce[stage], gather[stage] = both
        if tied is not None:
            both = _exchanged(config, layout, tied)
            ends = [stage for stage in (0, layout.stages - 1) if stage in buckets]
            own = ends[0] if ends else 0
            reduce[own] = reduce[own] + both[0]
            gather[own] = gather[own] + both[1]
    return reduce, gather


def _exchanged(config: Config, layout: Layout, bucket: BucketPlan) -> tuple[float, float]:
    """Seconds of the bucket's reduction and of its gathering."""
    extent = layout.tp * layout.cp * layout.dp
    if "pp" in bucket.shard.axis + bucket.replicate.axis:
        extent *= layout.pp
    rate = 1e9 * speed(config, extent)
    weights = bucket.numel * DTYPE_BYTES[config.model.dtype]
    gathered = Exchange("dp", "all_gather", "weights", 1, weights, bucket.shard.members).wire
    reduced = sum(exchange.wire for exchange in reduction(config, bucket, 1))
    return float(reduced) / rate, float(gathered) / rate
