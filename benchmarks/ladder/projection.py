"""Projection from times measured on one device to pipelines of many, in the simulator."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ladder.sizes import Size
from megapipe.errors import MegapipeError
from megapipe.model.gpt.model_spec import GPTSpec
from megapipe.model.interface import RunShape
from megapipe.model.partition import balanced, parse_layout
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import accepts, build
from megapipe.schedule.ir import Schedule
from megapipe.schedule.memory import peak_held
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.simulate import simulate

NODE = 8
"""GPUs that are linked among each other."""


@dataclass(frozen=True)
class Parts:
    """Seconds of an operation of one kind on a whole micro-batch."""

    embedding: float
    layer: float
    head: float


@dataclass(frozen=True)
class Measured:
    """Measured times of one GPU."""

    size: Size
    rows: int
    layers: int
    """Layers per stage."""
    parts: Mapping[str, Parts]
    """Times by kind of operation."""
    split: float
    """I + W of a stage divided by B of the same stage: median over stages."""
    gaps: float
    """Time from the first operation to the last divided by the sum of the operations' times: no
    cost includes the device's waits between them."""

    @property
    def backward(self) -> Parts:
        first, second = self.parts["I"], self.parts["W"]
        return Parts(
            first.embedding + second.embedding,
            first.layer + second.layer,
            first.head + second.head,
        )


@dataclass(frozen=True)
class Links:
    """Seconds and bytes per second of a message, within a node and between nodes."""

    latency: tuple[float, float]
    bandwidth: tuple[float, float]


@dataclass(frozen=True)
class Projection:
    """A schedule on a number of ranks."""

    schedule: str
    ranks: int
    microbatches: int
    makespan: float
    bubble: float
    held: float
    """Most activations that a rank holds, in micro-batches of all its layers."""
    tflops: float
    """Model FLOPs per second and GPU, in units of 1e12."""


def parts_of(times: Sequence[float], layers: int) -> Parts:
    """Derive an operation's parts from the times of stages of `layers` layers each, the first with
    the embedding and the last with the head."""
    layer = statistics.mean(times[1:-1]) / layers
    rest = [max(0.0, time - layers * layer) for time in (times[0], times[-1])]
    return Parts(rest[0], layer, rest[1])


def cost_on(measured: Measured, placement: Placement, links: Links) -> Cost:
    """Return the cost of operations and messages on a placement with as many layers per rank."""
    layers = measured.layers * placement.ranks
    whole, backward = measured.parts["F"], measured.backward
    costs = [
        whole.embedding + backward.embedding,
        *[whole.layer + backward.layer] * layers,
        whole.head + backward.head,
    ]
    text = balanced(costs, placement)
    stages = parse_layout(text, layers)
    times = {
        kind: tuple(
            len(stage.layers) * parts.layer
            + stage.embedding * parts.embedding
            + stage.head * parts.head
            for stage in stages
        )
        for kind, parts in measured.parts.items()
    }
    ranks = range(placement.ranks)
    far = {(a, b): a // NODE != b // NODE for a in ranks for b in ranks if a != b}
    bytes_each = 2 * measured.rows * measured.size.sequence * measured.size.hidden
    return Cost(
        F=times["F"],
        I=times["I"],
        W=times["W"],
        B=times["B"],
        latency={pair: links.latency[apart] for pair, apart in far.items()},
        bandwidth={pair: links.bandwidth[apart] for pair, apart in far.items()},
        message=bytes_each,
    )


def schedule_at(
    name: str, ranks: int, microbatches: int, measured: Measured, links: Links
) -> Schedule:
    """Return a registered schedule, made for these costs if it uses costs."""
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    if "cost" not in accepts(name):
        return schedule
    cost = cost_on(measured, schedule.placement, links)
    return build(name, ranks=ranks, microbatches=microbatches, cost=cost)


def project(
    measured: Measured, links: Links, name: str, ranks: int, microbatches: int
) -> Projection:
    """Simulate one schedule.

    Raises:
        MegapipeError: it cannot have so many ranks or micro-batches.
    """
    schedule = schedule_at(name, ranks, microbatches, measured, links)
    line = simulate(schedule, cost_on(measured, schedule.placement, links))
    size = measured.size
    model = size.model.model_copy(update={"layers": measured.layers * ranks})
    tokens = microbatches * measured.rows * size.sequence
    flops = tokens * GPTSpec(model, RunShape(size.sequence, microbatch=1)).token_flops()
    makespan = float(line.makespan)
    return Projection(
        schedule=name,
        ranks=ranks,
        microbatches=microbatches,
        makespan=makespan,
        bubble=float(line.bubble_makespan),
        held=float(max(peak_held(schedule))),
        tflops=flops / makespan / ranks / 1e12,
    )


def project_all(
    measured: Measured,
    links: Links,
    schedules: Sequence[str],
    ranks: Sequence[int],
    per_rank: int,
    budget_s: float,
) -> Iterator[Projection | tuple[str, int, str]]:
    """Yield every schedule at every number of ranks; (schedule, ranks, why) if it is not
    possible."""
    end = time.perf_counter() + budget_s
    for p in ranks:
        for name in schedules:
            if time.perf_counter() > end:
                yield name, p, f"no time left of {budget_s:.0f} s"
                continue
            try:
                yield project(measured, links, name, p, per_rank * p)
            except MegapipeError as error:
                yield name, p, str(error)
