"""How long a step takes, at speeds that are assumed.

An operation takes the time of the FLOPs of its kernels, as a run has them, at a share of the
device's peak (``log.efficiency``), and that of its tensor-parallel collectives at the speed of a
node's links or of the network, in I, B or R also those of a recomputed forward. With
``kernels.overlap`` other collectives of B and W count only as far as they outlast the weight
gradients beside which they run. Tokens travel to experts, which are chosen evenly, and back, and
are waited for, but for the time in which a simulation of the layer computes meanwhile
(:mod:`megapipe.plan.moe.time`). Slices of a sequence share an operation's time as
``pipeline.slice_*`` say. The simulator lets messages and the collectives of replicas run beside
operations. Other latencies than these exchanges', the update and waits for memory are not modelled;
the share of the peak has to cover them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layout.buckets import BucketPlan, process_buckets
from megapipe.layout.context_plan import PASSES, Pass
from megapipe.layout.layout import Layout
from megapipe.layout.links import speed
from megapipe.layout.speeds import Speeds
from megapipe.plan.context_choice import cost_of
from megapipe.plan.moe.time import alike, training_passes
from megapipe.plan.moe.ways import is_of_experts
from megapipe.plan.traffic import (
    CollectiveTraffic,
    largest_message,
    message_bytes,
    operation_transfers,
    reduction,
)
from megapipe.plan.unit import Operation, Transfer
from megapipe.plan.units import Units
from megapipe.schedule.cost import WHOLE, Buckets, Cost, GradBucket
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import pairs
from megapipe.schedule.streams.times import window_times
from megapipe.schedule.timing.simulate import Timeline, simulate
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

KINDS: tuple[Operation, ...] = ("F", "R", "I", "W", "B")
SIMULATED = ("attention", "experts")


def simulate_step(units: Units, speeds: Speeds) -> Timeline:
    """Simulate a step, or some windows of a stream: in seconds, or if the device's peak is not
    known in FLOPs, with those of a layer's forward as 1."""
    layout = units.layout
    return simulate(layout.run_schedule, _cost(units, speeds), layout.replicas)


def expected_step(units: Units, speeds: Speeds, timeline: Timeline) -> tuple[float, float]:
    """Return the time of a step in the units of :func:`simulate_step`, whose `timeline` that is,
    and what a pause adds: of a stream, a window in the steady state; others have no pause."""
    stream = units.layout.async_schedule
    if stream is not None:
        times = window_times(stream, _cost(units, speeds))
        return float(times.window), float(times.pause)
    return float(timeline.makespan), 0.0


def _cost(units: Units, speeds: Speeds) -> Cost:
    if speeds.tflops is None:
        layout = units.layout
        tokens = layout.local_length * units.config.train.microbatch
        return _computed(units, tokens / layout.tp * float(layout.model.reference_layer_flops()))
    return timed_cost(units, speeds)


def _computed(units: Units, rate: float) -> Cost:
    """Time of the FLOPs of every operation at so many in a unit of time."""
    stages = range(units.layout.stages)
    F, R, I, W = (  # noqa: E741
        tuple(units.flops(stage, what) / rate for stage in stages) for what in KINDS[:4]
    )
    return replace(units.layout.cost, F=F, R=R, I=I, W=W)


def timed_cost(units: Units, speeds: Speeds) -> Cost:
    """Seconds of every operation, message, reduction and gathering of a step, on a device of known
    speed. Raises :class:`ConfigError`."""
    config, layout = units.config, units.layout
    computed = _computed(units, speeds.reached)
    reduce, gather, buckets = _replicas(config, layout)
    stride = layout.tp * layout.cp * layout.dp

    hidden, compiled = config.kernels.overlap, config.kernels.compile
    link, own = 1e9 * speed(config, layout.tp), computed.table(layout.stages)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for stage in range(layout.stages):
        waits = _Waits.of(units, stage, speeds)
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
            (a, b): _between(config, a * stride, b * stride)
            for a, b in pairs(layout.schedule.placement)
        },
        message=largest_message(config, layout),
        reduce=tuple(reduce),
        gather=tuple(gather),
        buckets=buckets,
    )


class _Waits(NamedTuple):
    """Seconds that the operations of a stage wait for collectives of a whole micro-batch."""

    sent: Mapping[Operation, Mapping[str, float]]
    """Of all that an operation exchanges, at the speed of the slowest link, by :func:`_group`."""
    kept: Mapping[Operation, Mapping[str, float]]
    """The same where no layer recomputes."""
    simulated: Mapping[str, Mapping[Pass, float]]
    """Seconds that are waited for in one forward and one backward, by group."""

    @classmethod
    def of(cls, units: Units, stage: int, speeds: Speeds) -> "_Waits":
        """Those of a stage, on a device of known speed."""
        config, layout = units.config, units.layout

        def seconds(kind: Operation, *, recomputes: bool = True) -> Mapping[str, float]:
            found = dict.fromkeys((*SIMULATED, "tp", "others"), 0.0)
            for each in operation_transfers(units, stage, kind, recomputes=recomputes):
                found[_group(each)] += float(each.wire) / (1e9 * speed(config, each.span))
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
        """Seconds that F, R, I or W waits for others than tp. A forward that runs again waits as
        the first one does, or for as much less as it sends less."""
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
    """Name the part that a collective has: attention over cp, rows or matrices that go to experts
    and back, which are simulated with what is computed meanwhile; tp, or others."""
    if transfer.axis in ("cp", "ulysses") and transfer.kind != "all_reduce":
        return "attention"
    if is_of_experts(transfer):
        return "experts"
    return "tp" if transfer.axis == "tp" else "others"


def _message(config: Config, layout: Layout, stage: int, source: int) -> float:
    """Bytes that a process sends to its tp peers to put together one message between stages."""
    row = layout.schedule.placement.table[0]
    alone = layout.in_process
    if alone or not 0 <= source < len(row) or row[source] == row[stage] or not layout.scatters:
        return 0.0
    before = min(stage, source)
    size = message_bytes(layout, before, config.train.microbatch, layout.local_length)
    return float((layout.tp - 1) * size)


def _between(config: Config, first: int, second: int) -> float:
    """Bytes per second between two processes of the world."""
    parallel = config.parallel
    same = first // parallel.per_node == second // parallel.per_node
    return 1e9 * (parallel.node_gb_s if same else parallel.network_gb_s)


def _replicas(config: Config, layout: Layout) -> tuple[list[float], list[float], Buckets]:
    """Seconds to reduce each stage's gradients once, and to gather its weights; and by stage the
    buckets of its reduction.

    A tied matrix, which is in no stage, is counted with the first of its stages on each process,
    in the bucket that leaves last.
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
    """Share of the last W or B of a stage after which each of its buckets is complete; that of
    experts comes last."""
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
    """Neighbouring processes among which a bucket is reduced and gathered."""
    stretched = "pp" in bucket.shard.axis + bucket.replicate.axis
    return layout.tp * layout.cp * layout.dp * (layout.pp if stretched else 1)


def exchanged(config: Config, layout: Layout, bucket: BucketPlan) -> tuple[float, float]:
    """Seconds of the bucket's reduction and of its gathering, and of its copies with both: their
    gradients come before, and their weights leave after it."""
    rate = 1e9 * speed(config, extent(layout, bucket))
    weights = bucket.numel * DTYPE_BYTES[config.model.dtype]
    gathered = CollectiveTraffic(
        "dp", "all_gather", "weights", 1, weights, bucket.shard.members
    ).wire
    if bucket.frozen:
        return 0.0, float(gathered) / rate if layout.replicas.zero == 3 else 0.0
    reduced = sum(exchange.wire for exchange in reduction(config, bucket, 1))
    copies = bucket.replica_numel / (1e9 * speed(config, layout.ep_ranks))
    of_weights = copies * DTYPE_BYTES[config.model.dtype]
    of_gradients = copies * main_bytes(config.model.dtype)
    return float(reduced) / rate + of_gradients, float(gathered) / rate + of_weights
