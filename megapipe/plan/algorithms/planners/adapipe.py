"""AdaPipe (Sun et al., ASPLOS'24): recomputation by unit, and cuts that balance what remains.

Each stage recomputes the units that cost the least time, such that it just fits. Stages near the
end have fewer micro-batches in flight, recompute less, and get more units. The cuts minimize the
closed form of a pipeline; as that is not quite the simulation, the judge chooses among the best
few. All uniform pipelines are tried, with each tensor-parallel degree.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache

from megapipe.plan.algorithms.cuts import Partition, Step, partitions, widened
from megapipe.plan.algorithms.judge import stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.recompute import cheapest_recomputation
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import (
    Stages,
    Uniform,
    period,
    positions,
    shortest_simulated,
    uniform_shapes,
)


def plan(problem: Problem) -> PlannedPipeline | None:
    stages, found = Stages(problem), list[Partition]()

    @cache
    def fitted(
        shape: Uniform, first: int, last: int, after: int
    ) -> tuple[float, float, PlannedStage] | None:
        start = (shape.stages - after - 1) * shape.devices
        whole, _ = stages(first, last, start, shape.devices, shape.tp)
        made = cheapest_recomputation(problem, whole, after)
        if made is None:
            return None
        load = stage_load(problem, made)
        return load.forward + load.backward, period(problem, load), made

    def within(limit: float) -> list[Partition]:
        found.clear()
        for shape in uniform_shapes(problem, problem.tensor_sizes):
            found.extend(_cuts(shape, limit))
        return found

    def _cuts(shape: Uniform, limit: float) -> list[Partition]:
        def steps(last: int, first: int, after: Hashable) -> Iterator[Step]:
            assert isinstance(after, int)
            start = (shape.stages - after - 1) * shape.devices
            if start < 0 or stages.work[first] > limit * start:
                return
            load = stages(first, last, start, shape.devices, shape.tp)[1]
            if load.forward + load.backward > limit:
                return
            made = fitted(shape, first, last, after)
            if made is not None:
                yield Step(after + 1, *made)

        walked = partitions(positions(problem)[::-1], 0, steps, limit)
        return walked.get(shape.stages, [])

    widened(within, stages.least, problem.microbatches)
    best = shortest_simulated(found, problem)
    return None if best is None else best.plan(problem)


ALGORITHMS = (
    Algorithm(
        "adapipe",
        "AdaPipe (Sun et al., ASPLOS'24)",
        "synchronous pipeline in closed form, with recomputation by unit",
        plan,
    ),
)
