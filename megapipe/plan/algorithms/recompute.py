"""Which units of a stage recompute, so that the stage fits with the least additional time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from megapipe.plan.algorithms.judge import fixed_bytes, stage_load
from megapipe.plan.algorithms.pipeline import PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem, UnitCost
from megapipe.plan.algorithms.stages import peak

TOLERANCE = 1e-12
"""Relative difference below which two sums of the same figures count as equal."""


class _Flags(NamedTuple):
    """A choice for the units so far."""

    seconds: float
    """Additional seconds of a micro-batch."""
    saved: float
    """Bytes saved for a micro-batch."""
    chosen: tuple[int, ...]
    """Units that recompute."""


def cheapest_recomputation(
    problem: Problem, given: PlannedStage, after: int
) -> PlannedStage | None:
    """Return a stage with the units recomputed that cost the least time, such that it fits with
    `after` stages after it; None if it cannot fit. The stage must have one tensor-parallel degree.

    It is the knapsack of AdaPipe: sums of time and bytes, without those that another beats in both.
    Recomputing a unit rebuilds what it did not save, so the largest rebuilt unit is tried first.
    """
    if _fits(problem, given, after):
        return given
    tp, in_flight = given.choices[0].tp, min(problem.microbatches, after + 1)
    replicas, units = given.replicas(given.first), range(given.first, given.last)
    costs = [problem.cost(unit, unit + 1, tp, replicas) for unit in units]
    fixed = sum(fixed_bytes(cost, replicas) for cost in costs)
    best: _Flags | None = None
    for rebuilt in sorted({cost.saved - cost.saved_recompute for cost in costs}):
        room = (problem.memory - fixed - rebuilt) / in_flight
        found = _knapsack(units, costs, rebuilt, room)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return None if best is None else recomputed(given, best.chosen)


def recomputed(given: PlannedStage, units: Collection[int]) -> PlannedStage:
    """Return a stage in which these units recompute."""
    return stage(given.first, given.last, given.devices, given.choices[0].tp, units)


def _fits(problem: Problem, given: PlannedStage, after: int) -> bool:
    load = stage_load(problem, given)
    return peak(load, after, problem.microbatches) <= problem.memory


def _knapsack(
    units: Sequence[int], costs: Sequence[UnitCost], rebuilt: float, room: float
) -> _Flags | None:
    """Choose units that rebuild at most `rebuilt` bytes; return the fastest choice that saves at
    most `room` bytes."""
    found = [_Flags(0.0, 0.0, ())]
    rest = sum(min(cost.saved, cost.saved_recompute) for cost in costs)
    for unit, cost in zip(units, costs, strict=True):
        rest -= min(cost.saved, cost.saved_recompute)
        more = [_Flags(each.seconds, each.saved + cost.saved, each.chosen) for each in found]
        if cost.saved - cost.saved_recompute <= rebuilt:
            more += [
                _Flags(
                    each.seconds + cost.recompute,
                    each.saved + cost.saved_recompute,
                    (*each.chosen, unit),
                )
                for each in found
            ]
        found = []
        for each in sorted(more):
            if each.saved + rest > room * (1 + TOLERANCE):
                continue
            if not found or each.saved < found[-1].saved * (1 - TOLERANCE):
                found.append(each)
    return min(found, default=None)
