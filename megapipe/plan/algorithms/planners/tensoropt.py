"""TensorOpt: the trade-off between time and memory, not a single plan (Cai et al., 2004.10856)."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from megapipe.plan.algorithms.enumeration import Costs, Front, best_choices
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.strategies import Chosen, StrategyGraph, as_plan, of_chain


class Tradeoff(NamedTuple):
    """A choice of strategies that no other choice beats in both time and memory."""

    seconds: float
    bytes: float
    chosen: Chosen


POINTS = 32
"""Maximum number of points of each part of a frontier in :func:`plan`."""


def frontier(
    graph: StrategyGraph, memory: float = inf, points: int | None = None
) -> list[Tradeoff]:
    """Return all choices within `memory` bytes that are not dominated, the fastest first.

    What follows some operators depends only on the strategies of those whose outputs are still
    read, so choices that agree in these compete with each other. `points`: of more points than
    these, some are left out at each operator; by default the frontier is exact.
    """

    def extend(costs: Costs, chosen: Chosen) -> Costs | None:
        seconds, held, rebuilt = costs
        own = graph.strategies[len(chosen) - 1][chosen[-1]]
        held, rebuilt = held + own.memory, max(rebuilt, own.rebuilt)
        return (seconds + graph.added(chosen), held, rebuilt) if held + rebuilt <= memory else None

    found = best_choices(graph.options, extend, graph.live, (0.0, 0.0, 0.0), points)
    whole = Front(((seconds, held + rebuilt), chosen) for (seconds, held, rebuilt), chosen in found)
    return [Tradeoff(seconds, size, chosen) for (seconds, size), chosen in whole]


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the fastest choice of the frontier that fits: each unit's tensor-parallel degree and
    recomputation, on all devices without a pipeline. A frontier of a long chain is thinned to
    :data:`POINTS`, so the choice can be slightly slower than the best one."""
    found = frontier(of_chain(problem, recompute=True), problem.memory, POINTS)
    return as_plan(problem, found[0].chosen if found else (), recompute=True)


ALGORITHMS = (
    Algorithm(
        "tensoropt",
        "TensorOpt (Cai et al., 2004.10856)",
        "time and memory of one stage",
        plan,
    ),
)
