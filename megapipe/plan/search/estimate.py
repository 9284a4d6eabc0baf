"""Time and memory of a layout: quick lower bounds, and estimates from its plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from math import ceil
from typing import NamedTuple

from megapipe.layout.activations import uniform_recompute
from megapipe.layout.layout import Layout
from megapipe.layout.speeds import Speeds
from megapipe.model.partition import StageSpec, balanced, in_whole_units, parse_layout
from megapipe.plan.memory import model_memory
from megapipe.plan.memory_fit import demand, step_figures
from megapipe.plan.search.layouts import LayoutChoice
from megapipe.plan.search.pipelines import Pipeline
from megapipe.plan.step_time import simulate_step, timed_cost
from megapipe.plan.units import Units
from megapipe.schedule.ir import Kind
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.simulate import simulate


class Estimate(NamedTuple):
    """Time and memory of a layout's plan."""

    choice: LayoutChoice
    bytes: int
    """Peak bytes of the process that needs most."""
    seconds: float
    """Seconds of a step."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilisation, as a fraction of the devices' peak."""
    bubble: float
    """Fraction of the simulated makespan in which ranks have no operation."""


class ShapeCost(NamedTuple):
    """Lower bounds of a micro-batch's time and memory, for the parts of a model: embedding, one
    layer, head."""

    forward: Parts
    """Seconds of the forward."""
    input_grad: Parts
    """Seconds of an I."""
    weight_grad: Parts
    """Seconds of a W."""
    backward: Parts
    """Seconds of a B, or of an I and a W if these take less together."""
    held: Parts
    """Bytes saved from the forward to the backward."""
    fixed: Parts
    """Bytes of weights and gradients."""
    states: Parts
    """Bytes of optimizer states before sharding."""
    units: tuple[int, ...]
    """Relative FLOPs of the embedding, each layer and the head, for the partition into stages."""
    post_validation: bool
    """Whether updates do not wait for other ranks, so that a step is the longest time of a rank
    from its first operation to its last."""
    is_uniform: bool
    """Whether all layers cost the same, on all ranks. If not, :meth:`least_seconds` and
    :meth:`least_bytes` return bounds for an average rank."""

    @classmethod
    def of(cls, units: Units, speeds: Speeds) -> ShapeCost:
        """Compute the costs from a configuration with three stages: the embedding and a layer, the
        other layers, a layer and the head."""
        config, layout = units.config, units.layout
        inner = layout.model.layers - 2
        times = timed_cost(units, without_host(speeds)).table(3)
        memory = [model_memory(config, layout, rank) for rank in range(3)]
        both = [float(i) + float(w) for i, w in zip(times[Kind.I], times[Kind.W], strict=True)]
        backward = map(min, both, map(float, times[Kind.B]))
        shards = layout.dp * layout.cp
        costs = layout.model.unit_costs(uniform_recompute(config.activations))
        return cls(
            forward=Parts.of(map(float, times[Kind.F]), inner),
            input_grad=Parts.of(map(float, times[Kind.I]), inner),
            weight_grad=Parts.of(map(float, times[Kind.W]), inner),
            backward=Parts.of(backward, inner),
            held=Parts.of(
                (sum(unit.held for unit in units.of(stage)) for stage in range(3)), inner
            ),
            fixed=Parts.of((each.parameters + each.gradients for each in memory), inner),
            states=Parts.of((each.optimizer * shards for each in memory), inner),
            units=tuple(in_whole_units(costs)),
            post_validation=config.optimizer.post_validation,
            is_uniform=len({layout.model.kind(n) for n in range(layout.model.layers)}) == 1,
        )

    def least_seconds(
        self, choice: LayoutChoice, microbatches: int, pipeline: Pipeline | None
    ) -> float:
        """Return a lower bound of the seconds of a step: that of an average rank, or a better one
        if the `pipeline` is known and layers are equal.

        Each rank computes its share of all micro-batches, after the forwards of the stages before
        its first stage, and before the backwards of these stages if backwards are fused. And the
        first stage has only so many micro-batches in flight.
        """
        mean = microbatches * (self.forward.whole + self.backward.whole) / choice.pp
        if pipeline is None:
            return CUT_SLACK * mean
        if not self.is_uniform:
            return mean
        most = max(mean, self._in_flight_seconds(microbatches, pipeline))
        cut = self._cut(pipeline)
        forward, backward = (of.by_stage(cut) for of in (self.forward, self.backward))
        whole = [
            forward[stage] * (1 + (stage in pipeline.recompute)) + backward[stage]
            for stage in range(len(cut))
        ]
        for directions in pipeline.stages:
            work = min(sum(whole[stage] for stage in stages) for stages in directions)
            before = 0 if self.post_validation else min(chain.from_iterable(directions))
            around = sum(forward[:before]) + sum(backward[:before]) * pipeline.is_fused
            most = max(most, microbatches * work + pipeline.smallest * around)
        return most

    def _in_flight_seconds(self, microbatches: int, pipeline: Pipeline) -> float:
        """Return a lower bound of the seconds of a step: a micro-batch is in flight at the first
        stage until it has passed all stages forward and backward."""
        if pipeline.in_flight is None:
            return 0.0
        backward = self.backward if pipeline.is_fused else self.input_grad
        passage = self.forward.whole + backward.whole
        return ceil(microbatches / pipeline.holders[0]) / pipeline.in_flight * passage

    def least_bytes(
        self, choice: LayoutChoice, microbatches: int, pipeline: Pipeline | None
    ) -> float:
        """Return a lower bound of the peak bytes of the process that needs most."""
        if not self.is_uniform or pipeline is None:
            return self.fixed.whole / choice.pp * (choice.zero < 2)
        cut = self._cut(pipeline)
        fixed, states, held = (of.by_stage(cut) for of in (self.fixed, self.states, self.held))
        shards = choice.dp * choice.shape.cp if choice.zero else 1
        most = 0.0
        for directions, peak in zip(pipeline.stages, pipeline.peaks, strict=True):
            stages = set(chain.from_iterable(directions))
            weights = sum(fixed[stage] for stage in stages)
            if choice.zero >= 2:  # whole only while a stage computes
                weights = max(fixed[stage] for stage in stages) * (choice.zero == 3)
            saved = 0.0
            if not pipeline.recompute.intersection(stages):
                saved = min(held[stage] / pipeline.shares[stage] for stage in stages)
            of_rank = sum(states[stage] / pipeline.holders[stage] for stage in stages)
            most = max(most, weights + of_rank / shards + min(peak, microbatches) * saved)
        return most

    def simulated_seconds(self, layout: Layout) -> float:
        """Return a lower bound of the seconds of a step: simulate the layout's schedule with these
        compute costs; messages, reductions and the update take no time. 0 if layers differ,
        sequences are cut or the pipeline never flushes."""
        sliced = layout.run_schedule.slices > 1
        if sliced or not self.is_uniform or layout.async_schedule is not None:
            return 0.0
        F, I, W, B = (  # noqa: E741
            tuple(part.by_stage(layout.stage_layers))
            for part in (self.forward, self.input_grad, self.weight_grad, self.backward)
        )
        cost = replace(layout.cost, F=F, I=I, W=W, B=B, R=None)
        timeline = simulate(layout.run_schedule, cost)
        return float(max(timeline.spans) if self.post_validation else timeline.makespan)

    def _cut(self, pipeline: Pipeline) -> Sequence[StageSpec]:
        """Return the layers of each stage, as a resolved layout cuts them."""
        return _cut(self.units, pipeline.placement)


class Parts(NamedTuple):
    """A cost of the embedding, of one layer, of the head and of the whole model."""

    embedding: float
    layer: float
    head: float
    whole: float

    @classmethod
    def of(cls, stages: Iterable[float], inner: int) -> Parts:
        """Split the costs of three stages into parts. `inner`: layers of the middle stage."""
        first, middle, last = stages
        layer = middle / inner
        parts = first - layer, layer, last - layer, first + middle + last
        return cls(*(SLACK * max(0.0, each) for each in parts))

    def by_stage(self, cut: Sequence[StageSpec]) -> list[float]:
        """Return the cost of each stage."""
        return [
            self.embedding * stage.embedding
            + self.layer * len(stage.layers)
            + self.head * stage.head
            for stage in cut
        ]


def without_host(speeds: Speeds) -> Speeds:
    """Return the speeds of a device whose host starts kernels in no time. The times of a stage's
    kernels on the device add up; a stage's times with the host can be less than those of its
    parts."""
    device = speeds.known
    return replace(
        speeds, device=replace(device, architecture=replace(device.architecture, host_us=0))
    )


SLACK = 0.97
"""Factor that lowers the bounds, because a layer can be faster in one stage than in another."""
CUT_SLACK = 0.7
"""Factor that lowers the bound if the schedule's properties are unknown: attention of a slice can
have a faster kernel than that of a whole sequence."""


@cache
def _cut(costs: tuple[int, ...], placement: Placement) -> Sequence[StageSpec]:
    return parse_layout(balanced(costs, placement), len(costs) - 2)


def estimate(choice: LayoutChoice, units: Units, speeds: Speeds) -> Estimate:
    """Simulate a step of a layout on a device of known speed."""
    timeline = simulate_step(units, speeds)
    figures = step_figures(units, speeds, timeline)
    assert figures is not None
    return Estimate(
        choice=choice,
        bytes=demand(units).most.total,
        seconds=figures.seconds,
        tokens_per_second=figures.tokens_per_second,
        mfu=figures.mfu,
        bubble=max(0.0, float(timeline.bubble_makespan)),
    )
