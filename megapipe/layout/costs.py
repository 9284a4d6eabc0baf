"""Costs of each stage's operations, as the model's family counts them.

By them layers are shared out (:mod:`megapipe.model.partition`) and orders are made for stages that
differ, before a stage can be built. A plan is drawn and timed by what a run of the stages computes
(:mod:`megapipe.plan.pace`).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megapipe.config.config import Config
from megapipe.layers.policy import BlockSpan
from megapipe.layout.activations import block_policies, uniform_recompute
from megapipe.layout.cuts import slice_time
from megapipe.layout.family import model_spec_of
from megapipe.model.interface import ModelSpec, Work
from megapipe.model.partition import StageSpec, balanced, parse_layout
from megapipe.schedule.cost import Cost, PerStage
from megapipe.schedule.placement import Placement


def stage_work(
    family: ModelSpec,
    stages: Sequence[StageSpec],
    spans: Sequence[Sequence[BlockSpan]],
    again: Collection[int],
) -> tuple[Work, ...]:
    """FLOPs per token of each stage, with `spans` as its layers' policies; the stages `again` are
    recomputed as a whole."""
    return tuple(
        family.work(stage, own, again=number in again)
        for number, (stage, own) in enumerate(zip(stages, spans, strict=True))
    )


def relative_cost(
    config: Config, family: ModelSpec, work: Sequence[Work], slice_lengths: Sequence[int]
) -> Cost:
    """The costs of stages in FLOPs per token; messages and replicas take no time."""
    F, I, W, R = zip(*work, strict=True)  # noqa: E741
    sliced = len(slice_lengths) > 1
    shares = slice_time(config, family).shares(slice_lengths) if sliced else None
    return Cost(F=F, I=I, W=W, R=R, slices=shares)


def scaled(cost: Cost, factor: float) -> Cost:
    """The costs with the times of F, I, W and R multiplied by `factor`."""

    def times(row: PerStage | None) -> tuple[float, ...]:
        assert isinstance(row, tuple)
        return tuple(float(time) * factor for time in row)

    return replace(cost, F=times(cost.F), I=times(cost.I), W=times(cost.W), R=times(cost.R))


def placement_cost(config: Config, placement: Placement) -> Cost:
    """The costs of a resolved model's stages on a placement for which its layers are balanced; 1 is
    the forward of a layer."""
    family, activations = model_spec_of(config), config.activations
    text = balanced(
        family.unit_costs(uniform_recompute(activations)),
        placement,
        ends=family.has_embedding_and_head,
    )
    stages = parse_layout(text, family.layers, ends=family.has_embedding_and_head)
    every = range(len(stages))
    kept = stage_work(family, stages, block_policies(activations, stages), ())
    again = stage_work(family, stages, block_policies(activations, stages, every), every)
    work = [own._replace(R=other.R) for own, other in zip(kept, again, strict=True)]
    return scaled(relative_cost(config, family, work, ()), 1 / family.reference_layer_flops())
