"""Strategies of operators: each operator is computed in one of several ways, and neighbours that do
not agree pay for it.

Costs are sums: of each operator's strategy, and of each pair of neighbours. Alpa's inner problem,
AutoDDL and TensorOpt are searches in such a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

from megapipe.plan.algorithms.judge import resharding_seconds, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, UnitChoice
from megapipe.plan.algorithms.problem import Problem

Chosen = tuple[int, ...]
"""Index of the strategy of each operator."""


class Strategy(NamedTuple):
    """One way to compute an operator."""

    name: str
    cost: float
    """Cost of the operator alone: seconds, or bytes on the wire."""
    memory: float = 0.0
    """Bytes on each device."""
    rebuilt: float = 0.0
    """Bytes of memory that only one operator at a time needs."""


@dataclass(frozen=True, eq=False)
class StrategyGraph:
    """Operators in topological order with their strategies."""

    strategies: Sequence[Sequence[Strategy]]
    edges: Mapping[tuple[int, int], Sequence[Sequence[float]]]
    """Cost of each pair of strategies, by (producer, consumer): edges[u, v][i][j] is the cost if u
    has strategy i and v has strategy j."""

    @cached_property
    def options(self) -> list[range]:
        """Indices of the strategies of each operator."""
        return [range(len(each)) for each in self.strategies]

    @property
    def has_choices(self) -> bool:
        """Whether every operator has a strategy."""
        return all(self.strategies)

    @cached_property
    def producers(self) -> list[list[int]]:
        """Operators whose outputs each operator reads."""
        return [[u for u, v in self.edges if v == node] for node in range(len(self.strategies))]

    @cached_property
    def _last_users(self) -> list[int]:
        """Last operator that reads each operator's output; -1 if none does."""
        nodes = range(len(self.strategies))
        return [max((v for u, v in self.edges if u == node), default=-1) for node in nodes]

    def live(self, chosen: Chosen) -> tuple[int, ...]:
        """Return the strategies of the first operators that later ones will read."""
        users, count = self._last_users, len(chosen)
        return tuple(own for node, own in enumerate(chosen) if users[node] >= count)

    def added(self, chosen: Chosen) -> float:
        """Return what the last one of the first operators adds to the cost."""
        node = len(chosen) - 1
        moved = sum(self.edges[u, node][chosen[u]][chosen[node]] for u in self.producers[node])
        return self.strategies[node][chosen[node]].cost + moved

    def cost(self, chosen: Chosen) -> float:
        """Return the cost of the first operators with the strategies `chosen`."""
        return sum(self.added(chosen[: count + 1]) for count in range(len(chosen)))

    def memory(self, chosen: Chosen) -> float:
        """Return the bytes of the first operators on each device."""
        own = [each[index] for each, index in zip(self.strategies, chosen, strict=False)]
        return sum(each.memory for each in own) + max((each.rebuilt for each in own), default=0)

    def names(self, chosen: Sequence[int]) -> list[str]:
        """Return the names of the chosen strategies."""
        return [each[index].name for each, index in zip(self.strategies, chosen, strict=True)]


def unit_choices(problem: Problem, *, recompute: bool) -> list[UnitChoice]:
    """Return the ways to compute a unit on all devices: its tensor-parallel degree, and if
    `recompute`, whether it recomputes its forward."""
    again = (False, True) if recompute else (False,)
    sizes = [
        tp
        for tp in problem.tensor_sizes
        if problem.devices % tp == 0 and problem.devices // tp in problem.replica_counts
    ]
    return list(map(UnitChoice._make, product(sizes, again)))


def of_chain(problem: Problem, *, recompute: bool = False) -> StrategyGraph:
    """Return the strategies of a chain's units on all devices (:func:`unit_choices`). The cost of
    all units is the time of a step of the pipeline with one stage."""
    choices = unit_choices(problem, recompute=recompute)
    devices, count = tuple(range(problem.devices)), problem.microbatches
    strategies = []
    for unit in range(problem.length):
        own = []
        for choice in choices:
            load = stage_load(problem, PlannedStage(unit, (choice,), devices))
            seconds = count * (load.forward + load.backward) + load.reduce
            name = f"tp {choice.tp}" + ", recompute" * choice.recompute
            own.append(Strategy(name, seconds, load.fixed + load.saved, load.rebuilt))
        strategies.append(own)

    def moved(unit: int, *pair: UnitChoice) -> float:
        return count * sum(resharding_seconds(problem, PlannedStage(unit, pair, devices), unit))

    edges = {
        (unit, unit + 1): [[moved(unit, a, b) for b in choices] for a in choices]
        for unit in range(problem.length - 1)
    }
    return StrategyGraph(strategies, edges)


def as_plan(
    problem: Problem, chosen: Sequence[int], *, recompute: bool = False
) -> PlannedPipeline | None:
    """Return the plan of one stage whose units have the strategies of :func:`of_chain`; None if
    `chosen` is empty."""
    choices = unit_choices(problem, recompute=recompute)
    own = tuple(choices[index] for index in chosen)
    stage = PlannedStage(0, own, tuple(range(problem.devices)))
    return PlannedPipeline((stage,), problem.microbatches) if own else None
