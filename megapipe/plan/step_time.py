"""How long a step takes, at assumed speeds.

An operation takes the time of its kernels on the device (:mod:`megapipe.plan.kernel_time`), and of
its tensor-parallel collectives, at the speed of a node's links or of the network. It takes at least
the time in which the host starts its kernels. I, B or R include the collectives of a recomputed
forward. With ``kernels.tp_comm_overlap`` all other collectives of B and W count only as far as they
take longer than the weight gradients that overlap with them. Dispatch and combine, with evenly
chosen experts, count as far as no compute overlaps with them in a simulation of the layer
(:mod:`megapipe.plan.moe.moe_layer_time`). Slices of a sequence share an operation's time by
``pipeline.slice_*``. The simulator overlaps messages and data-parallel collectives with operations.
The update takes the time of the bytes that it reads and writes, after the last rank has finished.
With post-validation ranks do not wait for each other, so a step is as long as the longest rank's
operations. Reading data, saving and logging are not planned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.buckets import BucketPlan, process_buckets
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.layout import Layout
from megapipe.layout.p2p import link_latency, speed, speed_between
from megapipe.layout.speeds import Speeds, pipeline_speeds, stage_speeds
from megapipe.plan.context_options import cost_of
from megapipe.plan.kernel_time import KernelTime, ring_seconds, transfer_seconds
from megapipe.plan.memory import update_bytes
from megapipe.plan.moe.dispatch_traffic import is_of_experts
from megapipe.plan.moe.moe_layer_time import alike, training_passes
from megapipe.plan.traffic import (
    CollectiveTraffic,
    largest_message,
    message_bytes,
    operation_transfers,
    reduction,
)
from megapipe.plan.unit import Operation, Transfer, Unit
from megapipe.plan.units import Units
from megapipe.schedule.async_schedules.times import window_times
from megapipe.schedule.cost import WHOLE, Buckets, Cost, GradBucket, Time
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import pairs
from megapipe.schedule.timing.simulate import Timeline, simulate
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

KINDS: tuple[Operation, ...] = ("F", "R", "I", "W", "B")
SIMULATED = ("attention", "experts")


def simulate_step(units: Units, speeds: Speeds) -> Timeline:
    """Simulate a step, or several windows of a no-flush schedule. Times are in seconds; if the
    device's peak is unknown, in units of a layer's forward FLOPs."""
    layout = units.layout
    return simulate(layout.run_schedule, _cost(units, speeds), layout.replicas)


class StepTime(NamedTuple):
    """Times of a step in the unit of its simulated timeline."""

    step: float
    """Time of a step with its update; of a steady-state window with a no-flush schedule."""
    update: float
    """Part of `step` in which the slowest rank updates its weights after all operations."""
    pause: float
    """Extra time of a flush with a no-flush schedule."""


def expected_step(units: Units, speeds: Speeds, timeline: Timeline) -> StepTime:
    """Return the times of a step, of which :func:`simulate_step` returned the `timeline`."""
    config, layout = units.config, units.layout
    stream = layout.async_schedule
    update = 0.0
    if speeds.device is not None:
        slowness = [1 / float(speed) for speed in pipeline_speeds(config)]
        moved = max(update_bytes(config, layout, rank) * slow for rank, slow in enumerate(slowness))
        update = KernelTime(speeds).moved(moved)
    if stream is not None:
        times = window_times(stream, _cost(units, speeds))
        return StepTime(float(times.window) + update, update, float(times.pause))
    whole = float(timeline.makespan)
    if config.optimizer.post_validation:
        whole = float(max(timeline.spans) + timeline.exposed_reduce)
    return StepTime(whole + update, update, 0.0)


def _cost(units: Units, speeds: Speeds) -> Cost:
    if speeds.device is None:
        layout = units.layout
        tokens = layout.local_length * units.config.train.microbatch
        rate = tokens / layout.tp * float(layout.model.reference_layer_flops())
        return _computed(units, lambda what, unit: unit.flops(what) / rate)
    return timed_cost(units, speeds)


def _computed(units: Units, time: Callable[[Operation, Unit], float]) -> Cost:
    """Return costs in which operations take only the time of their kernels."""
    speeds = stage_speeds(units.config, units.layout.schedule.placement)

    def by_stage(what: Operation) -> tuple[Time, ...]:
        mean = {stage: units.mean(stage, partial(time, what)) for stage in set(units.alike)}
        return tuple(mean[stage] / speed for stage, speed in zip(units.alike, speeds, strict=True))

    return replace(
        units.layout.cost, F=by_stage("F"), R=by_stage("R"), I=by_stage("I"), W=by_stage("W")
    )


def timed_cost(units: Units, speeds: Speeds) -> Cost:
    """Return the costs of a step in seconds: operations, messages, reductions and all-gathers. The
    device's speed must be known."""
    config, layout = units.config, units.layout
    kernels = KernelTime(speeds)
    computed = _computed(units, kernels.seconds)
    reduce, gather, buckets = _replicas(config, layout)

    hidden, compiled = config.kernels.tp_comm_overlap, config.kernels.compile
    link, own = 1e9 * speed(config, layout.tp), computed.table(layout.stages)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waits_of = {stage: _Waits.of(units, stage, speeds) for stage in set(units.alike)}
    for stage, same in enumerate(units.alike):
        waits = waits_of[same]
        F, R, I, W = (float(own[Kind[k]][stage]) + waits.besides_tp(k) for k in KINDS[:4])  # noqa: E741
        F += _message(config, layout, stage, stage - 1) / link
        I += _message(config, layout, stage, stage + 1) / link  # noqa: E741
        tp = {kind: waits.sent[kind]["tp"] for kind in KINDS}
        backward = waits.kept["B"]["tp"]
        times["F"].append(F + tp["F"])
        times["R"].append(R + tp["R"])
        times["I"].append(I + tp["I"])
        times["W"].append(max(W, tp["W"]) if hidden else W + tp["W"])
        if compiled:
            times["B"].append(times["I"][-1] + times["W"][-1])
        else:
            I += tp["B"] - backward  # noqa: E741
            times["B"].append(I + (max(W, backward) if hidden else W + backward))

    return replace(
        computed,
        F=tuple(times["F"]),
        R=tuple(times["R"]),
        I=tuple(times["I"]),
        W=tuple(times["W"]),
        B=tuple(times["B"]),
        bandwidth={
            (a, b): 1e9 * speed_between(config, a, b) for a, b in pairs(layout.schedule.placement)
        },
        message=largest_message(config, layout),
        latency=link_latency(config),
        reduce=tuple(reduce),
        gather=tuple(gather),
        buckets=buckets,
    )


class _Waits(NamedTuple):
    """Seconds that a stage's operations on a micro-batch wait for collectives."""

    sent: Mapping[Operation, Mapping[str, float]]
    """Seconds of all collectives, by operation and group, at the speed of the slowest link."""
    kept: Mapping[Operation, Mapping[str, float]]
    """Seconds like `sent`, but as if no layer recomputed."""
    simulated: Mapping[str, Mapping[Pass, float]]
    """Seconds, by group and pass, that no compute overlaps with."""

    @classmethod
    def of(cls, units: Units, stage: int, speeds: Speeds) -> "_Waits":
        """Compute the waits of a stage, on a device of known speed."""
        config, layout = units.config, units.layout

        def seconds(kind: Operation, *, recomputes: bool = True) -> Mapping[str, float]:
            found = dict.fromkeys((*SIMULATED, "tp", "others"), 0.0)
            for each in operation_transfers(units, stage, kind, recomputes=recomputes):
                found[_group(each)] += transfer_seconds(config, each)
            return found

        sent = {kind: seconds(kind) for kind in KINDS}
        kept = {kind: seconds(kind, recomputes=False) for kind in KINDS}
        layers = layout.stage_layers[stage].layers
        simulated = {group: dict.fromkeys(PASSES, 0.0) for group in SIMULATED}
        if layout.cp > 1:
            exposed = cost_of(config, speeds).exposed
            simulated["attention"] = {what: len(layers) * exposed[what] for what in PASSES}
        if sent["F"]["experts"]:
            experts = {n: count for n, count in layout.model.experts().items() if n in layers}
            for layer, number in alike(experts).items():
                dispatch, chunks = config.experts.dispatch, config.experts.number_of_chunks
                passes = training_passes(units, speeds, layer, dispatch, chunks)
                for what in PASSES:
                    simulated["experts"][what] += number * passes[what].exposed
        return cls(sent, kept, simulated)

    def besides_tp(self, kind: Operation) -> float:
        """Return the seconds that an F, R, I or W waits for groups other than tp; a recomputed
        forward waits in proportion to the bytes that it sends."""
        sent, total = self.sent[kind], self.sent[kind]["others"]
        for group, once in self.simulated.items():
            forward = self.sent["F"][group]
            if kind == "W":
                total += sent[group]
            elif forward:
                again = sent[group] - (self.kept["I"][group] if kind == "I" else 0)
                total += again / forward * once["F"] + (once["I"] if kind == "I" else 0)
        return total


def _group(transfer: Transfer) -> str:
    """Name a collective's group: attention (over cp) and experts (dispatch, combine), which are
    simulated with overlapping compute; tp; or others."""
    if transfer.axis in ("cp", "ulysses") and transfer.kind != "all_reduce":
        return "attention"
    if is_of_experts(transfer):
        return "experts"
    return "tp" if transfer.axis == "tp" else "others"


def _message(config: Config, layout: Layout, stage: int, source: int) -> float:
    """Return the bytes that a process sends to tp peers so that they gather a sharded message."""
    row = layout.schedule.placement.table[0]
    alone = layout.in_process
    if alone or not 0 <= source < len(row) or row[source] == row[stage] or not layout.scatters:
        return 0.0
    before = min(stage, source)
    size = message_bytes(layout, before, config.train.microbatch, layout.local_length)
    return float((layout.tp - 1) * size)


def _replicas(config: Config, layout: Layout) -> tuple[list[float], list[float], Buckets]:
    """Return, by stage, the seconds to reduce its gradients once, the seconds to gather its
    weights, and the buckets of its reduction.

    A tied matrix, whose bucket belongs to no stage, counts in the last bucket of the first of its
    stages on each process.
    """
    gather, reduced_in = [0.0] * layout.stages, [[0.0] for _ in range(layout.stages)]
    leaving = [[1.0] for _ in range(layout.stages)]
    for rank in range(layout.pp):
        buckets = list(process_buckets(config, layout, rank))
        own = {stage: list(group) for stage, group in groupby(buckets, key=lambda b: b.stage)}
        tied = own.pop(layout.stages, None)
        for stage, group in own.items():
            both = [exchanged(config, layout, bucket) for bucket in group]
            gather[stage] = sum(gathered for _, gathered in both)
            if trained := [bucket for bucket in group if not bucket.frozen]:
                reduced_in[stage] = [reduced for reduced, _ in both[: len(trained)]]
                leaving[stage] = _complete(trained)
        if tied is not None:
            reduced, gathered = exchanged(config, layout, *tied)
            ends = [stage for stage in (0, layout.stages - 1) if stage in own]
            first = ends[0] if ends else 0
            reduced_in[first][-1] += reduced
            gather[first] += gathered
    return [sum(own) for own in reduced_in], gather, tuple(map(_shares, leaving, reduced_in))


def _complete(buckets: Sequence[BucketPlan]) -> list[float]:
    """Return the fractions of a stage's last W or B after which its buckets are complete, in order;
    the experts' bucket is the last."""
    done = list(accumulate(bucket.matmul_numel for bucket in buckets if not bucket.over_ep))
    late = [1.0] * (1 + len(buckets) - len(done))
    return [each / done[-1] for each in done[:-1]] + late


def _shares(leaving: Sequence[float], seconds: Sequence[float]) -> tuple[GradBucket, ...]:
    whole = sum(seconds)
    if not whole:
        return WHOLE
    return tuple(
        GradBucket(when, each / whole) for when, each in zip(leaving, seconds, strict=True)
    )


def extent(layout: Layout, bucket: BucketPlan) -> int:
    """Return the number of neighbouring processes among which a bucket is reduced and gathered."""
    stretched = "pp" in bucket.shard.axis + bucket.replicate.axis
    return layout.tp * layout.cp * layout.dp * (layout.pp if stretched else 1)


def exchanged(config: Config, layout: Layout, bucket: BucketPlan) -> tuple[float, float]:
    """Return the seconds to reduce a bucket and to gather it, with expert replicas: their gradients
    are sent before the reduction, and their weights after the gathering."""
    span = extent(layout, bucket)

    def seconds(size: float) -> float:
        members = bucket.shard.members * bucket.replicate.members
        return ring_seconds(config, size, members, span)

    weights = bucket.numel * DTYPE_BYTES[config.model.dtype]
    gathered = CollectiveTraffic(
        "dp", "all_gather", "weights", 1, weights, bucket.shard.members
    ).wire
    if bucket.frozen:
        return 0.0, seconds(float(gathered)) if layout.replicas.zero == 3 else 0.0
    reduced = sum(exchange.wire for exchange in reduction(config, bucket, 1))
    copies = bucket.replica_numel / (1e9 * speed(config, layout.ep_ranks))
    of_weights = copies * DTYPE_BYTES[config.model.dtype]
    of_gradients = copies * main_bytes(config.model.dtype)
    return seconds(float(reduced)) + of_gradients, seconds(float(gathered)) + of_weights
