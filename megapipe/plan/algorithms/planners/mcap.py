"""mCAP (Dreuning et al., Euro-Par'22): cuts that balance the peak memory of the stages.

The stages are as many as the devices allow. The largest peak of all stages is made as small as
possible; time plays no part, but it breaks ties.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from megapipe.plan.algorithms.cuts import Step, partitions
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, peak, positions, uniform_shapes


def plan(problem: Problem) -> PlannedPipeline | None:
    shape, stages = next(uniform_shapes(problem), None), Stages(problem)
    if shape is None:
        return None

    def steps(last: int, first: int, after: Hashable) -> Iterator[Step]:
        assert isinstance(after, int)
        start = (shape.stages - after - 1) * shape.devices
        if start >= 0:
            added, load = stages(first, last, start, shape.devices, shape.tp)
            seconds = load.forward + load.backward
            most = peak(load, after, problem.microbatches)
            yield Step(after + 1, seconds, most, added)

    found = partitions(positions(problem)[::-1], 0, steps).get(shape.stages)
    return found[-1].plan(problem) if found else None


ALGORITHMS = (
    Algorithm(
        "mcap",
        "mCAP (Dreuning et al., Euro-Par'22)",
        "largest peak memory of a stage",
        plan,
        optimal=True,
    ),
)
