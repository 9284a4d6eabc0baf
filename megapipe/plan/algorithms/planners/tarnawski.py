"""Optimal device placement by dynamic programming over ideals (Tarnawski et al., 2006.16423).

A graph of operators is cut in parts, one for each device, such that no part needs the output of a
later one. The load of a device is the time of its operators, forward and backward, and of the
messages into and out of its part; the largest load is the time between two micro-batches of a full
pipeline, and it is minimized exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf

from megapipe.plan.algorithms.ideals import Ideals, cut_in_parts, members
from megapipe.plan.algorithms.judge import StageLoad, judge
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage
from megapipe.plan.algorithms.problem import Operator, Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, Uniform, period, positions, uniform_shapes


def load(graph: Sequence[Operator], part: int, bandwidth: float) -> float:
    """Return the seconds of a device that has the operators `part` (a set as bits)."""
    seconds, moved = 0.0, dict[int, float]()
    for node, operator in enumerate(graph):
        inside = part >> node & 1
        if inside:
            seconds += operator.forward + operator.backward
        for source in operator.inputs:
            if (part >> source & 1) != inside:
                moved[source] = graph[source].output
    return seconds + 2 * sum(moved.values()) / bandwidth


def best_parts(
    graph: Sequence[Operator], devices: int, memory: float = inf, bandwidth: float = inf
) -> tuple[float, tuple[int, ...]] | None:
    """Return the largest load, and the operators of each device as a set (bits); None if nothing
    fits in `memory` bytes per device. An output is sent once, and its gradient comes back."""
    seconds = cache(lambda part: load(graph, part, bandwidth))

    def cost(before: int, after: int, _: int) -> float | None:
        part = after & ~before
        size = sum(graph[node].memory for node in members(part))
        return seconds(part) if size <= memory else None

    return cut_in_parts(Ideals([each.inputs for each in graph]), devices, cost)


def pipeline(problem: Problem, shape: Uniform) -> PlannedPipeline | None:
    """Return the pipeline with the smallest largest load, for stages of equally many devices."""
    stages, ends = Stages(problem), positions(problem)

    def cost(before: int, after: int, part: int) -> float | None:
        planned, own = made(before, after, part)
        if not stages.fits(own, shape.stages - 1 - part):
            return None
        sent = moved(planned.first, part - 1) + moved(planned.last, part)
        return period(problem, own) + sent

    def moved(cut: int, part: int) -> float:
        """Return the seconds of the messages at a cut behind a part, there and back."""
        if cut in (0, problem.length):
            return 0.0
        size = problem.cost(cut - 1, cut, shape.tp, shape.replicas).message
        starts = part * shape.devices, (part + 1) * shape.devices
        pair = [range(start, start + shape.devices, shape.tp) for start in starts]
        return 2 * problem.links.message(size, *pair)

    def made(before: int, after: int, part: int) -> tuple[PlannedStage, StageLoad]:
        first, last = ends[before.bit_length()], ends[after.bit_length()]
        return stages(first, last, part * shape.devices, shape.devices, shape.tp)

    chain = Ideals([range(max(0, node - 1), node) for node in range(len(ends) - 1)])
    found = cut_in_parts(chain, shape.stages, cost)
    if found is None:
        return None
    before, own = 0, []
    for number, part in enumerate(found[1]):
        if part:
            own.append(made(before, before | part, number)[0])
            before |= part
    return PlannedPipeline(tuple(own), problem.microbatches)


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the fastest pipeline over all numbers of stages; :func:`best_parts` also plans graphs
    of operators, which the trainer cannot run."""
    found = (pipeline(problem, shape) for shape in uniform_shapes(problem, problem.tensor_sizes))
    fitting = [each for each in found if each is not None]
    return min(fitting, key=lambda each: judge(problem, each).seconds, default=None)


ALGORITHMS = (
    Algorithm(
        "tarnawski",
        "Optimal device placement (Tarnawski et al., 2006.16423)",
        "largest load of a device",
        plan,
        optimal=True,
    ),
)
