"""Merak's recomputation by stage (Lai et al., TPDS'23): late stages recompute less.

The units are cut so that the slowest stage is as fast as possible. In 1F1B an early stage has more
micro-batches in flight, so each stage recomputes as few of its units as it must, its first ones,
and never fewer than the stage after it.
"""

from __future__ import annotations

from megapipe.plan.algorithms.judge import judge, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.recompute import recomputed
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, Uniform, balanced, peak, uniform_shapes


def plan(problem: Problem) -> PlannedPipeline | None:
    shapes = uniform_shapes(problem, problem.tensor_sizes)
    found = (_of_shape(problem, shape) for shape in shapes)
    plans = [each for each in found if each is not None]
    return min(plans, key=lambda each: judge(problem, each).seconds, default=None)


def _of_shape(problem: Problem, shape: Uniform) -> PlannedPipeline | None:
    stages: list[PlannedStage] = []
    least = 0
    for after, each in enumerate(reversed(balanced(Stages(problem), shape))):
        for count in range(least, len(each.choices) + 1):
            made = recomputed(each, range(each.first, each.first + count))
            if peak(stage_load(problem, made), after, problem.microbatches) <= problem.memory:
                break
        else:
            return None
        least = min(count, len(each.choices))
        stages.insert(0, made)
    return PlannedPipeline(tuple(stages), problem.microbatches) if stages else None


ALGORITHMS = (
    Algorithm(
        "merak",
        "Merak (Lai et al., TPDS'23)",
        "balanced cuts, recomputation that shrinks from stage to stage",
        plan,
    ),
)
