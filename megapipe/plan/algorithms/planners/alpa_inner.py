"""Alpa's inner problem: one strategy for each operator of a stage (Zheng et al., 2201.12023).

Alpa minimizes the costs of strategies plus those of resharding between neighbours, by integer
linear programming. Here operators are taken in order, and of all choices that agree in the
strategies that matter later, only the cheapest is continued. The result is the same optimum, so no
solver is needed.
"""

from __future__ import annotations

from megapipe.plan.algorithms.enumeration import Costs, best_choices
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.strategies import Chosen, StrategyGraph, as_plan, of_chain


def best_strategies(graph: StrategyGraph) -> tuple[float, Chosen]:
    """Return the least cost and the strategies that have it."""

    def extend(costs: Costs, chosen: Chosen) -> Costs:
        return (costs[0] + graph.added(chosen),)

    ((cost,), chosen), *_ = best_choices(graph.options, extend, graph.live)
    return cost, chosen


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the plan of a single stage on all devices: each unit's tensor-parallel degree. Alpa
    looks at memory only afterwards, when it chooses stages. :func:`best_strategies` also solves the
    operators of a block (:mod:`megapipe.plan.algorithms.matmuls`)."""
    graph = of_chain(problem)
    if not graph.has_choices:
        return None
    _, chosen = best_strategies(graph)
    return as_plan(problem, chosen) if graph.memory(chosen) <= problem.memory else None


ALGORITHMS = (
    Algorithm(
        "alpa_inner",
        "Alpa, inner problem (Zheng et al., 2201.12023)",
        "time of one stage",
        plan,
        optimal=True,
    ),
)
