"""AutoDDL: coordinate descent over the strategies of operators (Chen et al., 2301.06813).

AutoDDL changes one operator's strategy at a time to the one that costs least, from random starts.
The result is no proven optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

from megapipe.plan.algorithms.local_search import Trials, from_starts, in_turn
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.strategies import Chosen, StrategyGraph, as_plan, of_chain

EVALUATIONS = 5000
"""Number of choices that are evaluated."""
STARTS = 20
"""Number of starts; the first one gives all operators their first strategies."""


def descend_by_operator(graph: StrategyGraph, seed: int = 0) -> Trials[Chosen]:
    """Search by coordinate descent and return the trials with the best choice."""

    def others(node: int, chosen: Chosen) -> Iterator[Chosen]:
        return ((*chosen[:node], each, *chosen[node + 1 :]) for each in graph.options[node])

    rng = Random(seed)
    first = tuple(0 for _ in graph.options)
    starts = [first, *(tuple(map(rng.choice, graph.options)) for _ in range(STARTS - 1))]
    trials = Trials(graph.cost, EVALUATIONS)
    coordinates: list[Callable[[Chosen], Iterator[Chosen]]] = [
        partial(others, node) for node in range(len(graph.options))
    ]
    from_starts(trials, starts, lambda start: in_turn(trials, start, coordinates))
    return trials


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the plan of a single stage on all devices: each unit's tensor-parallel degree.
    :func:`descend_by_operator` also plans matrix products by their bytes on the wire
    (:mod:`megapipe.plan.algorithms.matmuls`)."""
    graph = of_chain(problem)
    chosen = descend_by_operator(graph).best if graph.has_choices else None
    fits = chosen is not None and graph.memory(chosen) <= problem.memory
    return as_plan(problem, chosen or ()) if fits else None


ALGORITHMS = (Algorithm("autoddl", "AutoDDL (Chen et al., 2301.06813)", "time of one stage", plan),)
