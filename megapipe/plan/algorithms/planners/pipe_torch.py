"""Pipe-Torch (Zhan and Zhang, CBD'19): a pipeline over links of unequal bandwidth.

The devices are put in an order along fast links: from each device on, the next one is that with the
fastest link to the one before. For each order, a dynamic program cuts the units and gives each
stage the next devices of the order; a stage of several devices has replicas. The slowest of all
stages, reductions and messages over their own links is made as fast as possible. The judge chooses
among the orders. It does not look at memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from megapipe.plan.algorithms.cuts import Partition, Step, partitions
from megapipe.plan.algorithms.judge import stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, period, positions, shortest_simulated


def plan(problem: Problem) -> PlannedPipeline | None:
    stages = Stages(problem)
    found = [each for order in orders(problem) for each in in_order(stages, order)]
    best = shortest_simulated(found, problem, tries=len(found))
    return None if best is None else best.plan(problem)


def orders(problem: Problem) -> list[Sequence[int]]:
    """Return the orders of workers along fast links, one from each first worker; without a matrix
    of bandwidths, the devices' own order."""
    count = problem.devices // problem.tensor_sizes[0]
    if problem.links.matrix is None:
        return [range(count)]
    found = dict[tuple[int, ...], None]()
    for first in range(count):
        order = [first]
        while len(order) < count:
            rest = [each for each in range(count) if each not in order]
            order.append(max(rest, key=lambda each: _speed(problem, order[-1], each)))
        found[tuple(order)] = None
    return list(found)


def _speed(problem: Problem, source: int, target: int) -> float:
    tp = problem.tensor_sizes[0]
    return problem.links.speed(source * tp, target * tp)


def in_order(stages: Stages, order: Sequence[int]) -> list[Partition]:
    """Return the partition with the fastest slowest stage or message, if stages take workers in an
    order."""
    problem, tp = stages.problem, stages.problem.tensor_sizes[0]

    def steps(last: int, first: int, free: Hashable) -> Iterator[Step]:
        assert isinstance(free, int)
        for count in problem.replica_counts:
            start = free - count
            if start < 0 or (start == 0) != (first == 0):
                continue
            workers = order[start:free]
            added = stage(first, last, [each * tp + t for each in workers for t in range(tp)], tp)
            load, sent = stage_load(problem, added), 0.0
            if first:
                size = problem.cost(first - 1, first, tp, count).message
                sent = 2 * size / _speed(problem, order[start - 1], order[start])
            seconds = load.forward + load.backward + sent
            yield Step(start, seconds, max(period(problem, load), sent), added)

    found = partitions(positions(problem)[::-1], len(order), steps)
    return sorted(found.get(0, []), key=lambda each: (each.slowest, each.total))[:3]


ALGORITHMS = (
    Algorithm(
        "pipe_torch",
        "Pipe-Torch (Zhan and Zhang, CBD'19)",
        "slowest stage, reduction or message over links of unequal bandwidth",
        plan,
    ),
)
