"""AutoPipe's planner (Liu et al., CLUSTER'22): half layers, moved around the critical stage.

The chain is cut between attention and MLP, too. The start is the partition with the fastest slowest
stage. Then the cuts beside the critical stage, the one that takes longest, move by one unit as long
as the simulated pipeline gets faster. All uniform pipelines are tried. It does not look at memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, Uniform, balanced, uniform_shapes


def plan(problem: Problem) -> PlannedPipeline | None:
    plans = [moved(problem, shape) for shape in uniform_shapes(problem)]
    return min(plans, key=lambda each: judge(problem, each).seconds, default=None)


def moved(problem: Problem, shape: Uniform) -> PlannedPipeline:
    """Balance a uniform pipeline over half layers, then move cuts around its critical stage."""
    stages = Stages(problem)
    found = plan_of(problem, balanced(stages, shape, halves=True))
    least = judge(problem, found).seconds
    while True:
        cuts, loads = found.cuts, [_seconds(stages, each) for each in found.stages]
        critical = max(range(len(loads)), key=loads.__getitem__)
        ends = [0, *cuts, problem.length]
        tries = list[tuple[float, int, PlannedPipeline]]()
        for at, by in ((critical, 1), (critical, -1), (critical + 1, -1), (critical + 1, 1)):
            other = [end + by * (index == at) for index, end in enumerate(ends)]
            if 0 < at < len(ends) - 1 and sorted(set(other)) == other:
                made = _cut_at(problem, shape, other)
                tries.append((judge(problem, made).seconds, len(tries), made))
        if not tries or min(tries)[0] >= least:
            return found
        least, _, found = min(tries)


def plan_of(problem: Problem, stages: Sequence[PlannedStage]) -> PlannedPipeline:
    """Return the 1F1B pipeline of stages."""
    return PlannedPipeline(tuple(stages), problem.microbatches)


def _seconds(stages: Stages, given: PlannedStage) -> float:
    devices, tp = given.devices, given.choices[0].tp
    _, load = stages(given.first, given.last, devices[0], len(devices), tp)
    return load.forward + load.backward


def _cut_at(problem: Problem, shape: Uniform, ends: Sequence[int]) -> PlannedPipeline:
    size = shape.devices
    made = [
        stage(ends[n], ends[n + 1], range(n * size, (n + 1) * size), shape.tp)
        for n in range(len(ends) - 1)
    ]
    return plan_of(problem, made)


ALGORITHMS = (
    Algorithm(
        "autopipe",
        "AutoPipe (Liu et al., CLUSTER'22)",
        "simulated pipeline, cuts within layers",
        plan,
    ),
)
