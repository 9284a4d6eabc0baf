"""Estimates the cost of each stage's operations from FLOPs that the model spec counts.

These costs balance layers over stages (:mod:`megapipe.model.partition`) and order the operations of
unequal stages, before any stage is built. Plans use measured costs of built stages instead
(:mod:`megapipe.plan.step_time`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megapipe.config.config import Config
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layout.activations import block_policies, uniform_recompute
from megapipe.layout.model_spec import model_spec_of
from megapipe.layout.sequence_slices import slice_time
from megapipe.model.interface import ModelSpec, Work
from megapipe.model.partition import StageSpec, balanced, parse_layout
from megapipe.schedule.cost import Cost, PerStage
from megapipe.schedule.placement import Placement


def stage_work(
    family: ModelSpec,
    stages: Sequence[StageSpec],
    spans: Sequence[Sequence[BlockSpan]],
    recomputed: Collection[int],
) -> tuple[Work, ...]:
    """Count the FLOPs per token of each stage. `spans`: for each stage, the recomputation policies
    of its blocks. `recomputed`: stages that are recomputed as a whole."""
    return tuple(
        family.work(stage, own, recompute=number in recomputed)
        for number, (stage, own) in enumerate(zip(stages, spans, strict=True))
    )


def relative_cost(
    config: Config, family: ModelSpec, work: Sequence[Work], slice_lengths: Sequence[int]
) -> Cost:
    """Return the costs of the stages in FLOPs per token; messages and reductions take no time. With
    several `slice_lengths` the costs also have each slice's share."""
    F, I, W, R = zip(*work, strict=True)  # noqa: E741
    sliced = len(slice_lengths) > 1
    shares = slice_time(config, family).shares(slice_lengths) if sliced else None
    return Cost(F=F, I=I, W=W, R=R, slices=shares)


def scaled(cost: Cost, factor: float) -> Cost:
    """Multiply the costs of F, I, W and R by `factor`."""

    def times(row: PerStage | None) -> tuple[float, ...]:
        assert isinstance(row, tuple)
        return tuple(float(time) * factor for time in row)

    return replace(cost, F=times(cost.F), I=times(cost.I), W=times(cost.W), R=times(cost.R))


def placement_cost(config: Config, placement: Placement) -> Cost:
    """Return the costs of a resolved model's stages in units of one layer's forward. The layers are
    balanced over the stages of `placement`."""
    family, activations = model_spec_of(config), config.activations
    text = balanced(
        family.unit_costs(uniform_recompute(activations)),
        placement,
        ends=family.has_embedding_and_head,
    )
    stages = parse_layout(text, family.layers, ends=family.has_embedding_and_head)
    every = range(len(stages))
    kept = stage_work(family, stages, block_policies(activations, stages), ())
    recomputed = stage_work(family, stages, block_policies(activations, stages, every), every)
    work = [own._replace(R=other.R) for own, other in zip(kept, recomputed, strict=True)]
    return scaled(relative_cost(config, family, work, ()), 1 / family.reference_layer_flops())
