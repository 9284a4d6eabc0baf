"""Pipelines whose stages have equally many devices and nearly equally many units."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.stages import Uniform, positions, uniform_shapes


def equal_stages(problem: Problem, shape: Uniform, *, recompute: bool = False) -> PlannedPipeline:
    """Return the pipeline that is cut into nearly equal numbers of units, with 1F1B."""
    ends, parts = positions(problem), len(positions(problem)) - 1
    cuts = [ends[round(index * parts / shape.stages)] for index in range(shape.stages + 1)]
    stages = []
    for rank, (first, last) in enumerate(pairwise(cuts)):
        devices = range(rank * shape.devices, (rank + 1) * shape.devices)
        stages.append(stage(first, last, devices, shape.tp, recompute))
    return PlannedPipeline(tuple(stages), problem.microbatches)


def likely_shapes(problem: Problem, count: int, most_ranks: int | None = None) -> Sequence[Uniform]:
    """Return up to `count` shapes on all devices whose equal stages are the fastest that fit; those
    that need least memory if none fit. `most_ranks`: maximum number of stages."""

    def order(shape: Uniform) -> tuple[bool, float]:
        found = judge(problem, equal_stages(problem, shape))
        return not found.fits, found.seconds if found.fits else max(found.peaks)

    every = uniform_shapes(problem, problem.tensor_sizes)
    allowed = [each for each in every if most_ranks is None or each.stages <= most_ranks]
    return sorted(allowed, key=order)[:count]
