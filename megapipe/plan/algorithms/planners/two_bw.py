"""PipeDream-2BW's planner: all widths, depths, micro-batch sizes and recomputation (Narayanan et
al., 2006.09503).

The model is cut in stages of equally many units, each with equally many replicas. The closed form
of the paper for repeated blocks is here a lower bound: plans are simulated in its order, until it
exceeds the best simulated time. So the result is the best plan of the enumeration also where
blocks differ. The paper plans for 2BW, which does not flush, and for PipeDream-Flush; this planner
plans for the latter (1F1B).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from megapipe.plan.algorithms.batch import microbatch_counts
from megapipe.plan.algorithms.enumeration import Cheapest, cheapest
from megapipe.plan.algorithms.judge import judge, message_seconds, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.shapes import equal_stages
from megapipe.plan.algorithms.stages import uniform_shapes


def candidates(problem: Problem) -> Iterator[PlannedPipeline]:
    """Yield a plan for each width, depth, number of micro-batches and choice of recomputation."""
    for count in microbatch_counts(problem):
        sized = problem.with_microbatches(count)
        for shape in uniform_shapes(sized):
            for recompute in (False, True):
                yield equal_stages(sized, shape, recompute=recompute)


def closed_form(problem: Problem, plan: PlannedPipeline) -> float:
    """Return a lower bound of the time of a step: the first micro-batch reaches a stage, the stage
    computes all of them, the last one returns to the first stage, whose gradients are reduced. It
    is the time itself if stages are equal and messages take no time."""
    loads = [stage_load(problem, each) for each in plan.stages]
    around, most = 0.0, 0.0
    for number, load in enumerate(loads):
        most = max(most, around + plan.microbatches * (load.forward + load.backward))
        if number + 1 < len(loads):
            sent = message_seconds(problem, plan.stages[number], plan.stages[number + 1])
            around += load.forward + load.backward + 2 * sent
    return most + loads[0].reduce


def enumerate_all(problem: Problem) -> Cheapest[PlannedPipeline] | None:
    """Return the best plan of the enumeration with its simulated seconds; None if none fits."""
    sized = cache(problem.with_microbatches)

    def seconds(plan: PlannedPipeline) -> float | None:
        found = judge(sized(plan.microbatches), plan)
        return found.seconds if found.fits else None

    return cheapest(
        candidates(problem), lambda plan: closed_form(sized(plan.microbatches), plan), seconds
    )


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the best plan of the enumeration."""
    found = enumerate_all(problem)
    return found and found.candidate


ALGORITHMS = (
    Algorithm(
        "pipedream_2bw",
        "PipeDream-2BW's planner (Narayanan et al., 2006.09503), with a flush",
        "simulated step time of equal stages",
        plan,
        optimal=True,
        enumerates=True,
    ),
)
