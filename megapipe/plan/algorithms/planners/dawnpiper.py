"""DawnPiper (Peng et al., 2025): cuts between the balance of time and the balance of memory.

The chain is cut in two, each part with half of the stages, and so on. The best cut of a part lies
between the one that balances computation and the one that balances memory: beyond them both get
worse. So only these cuts are tried. A stage that does not fit recomputes the units that cost the
least time. Cuts may be within a layer. DawnPiper can also swap activations to host memory, which a
problem does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf

from megapipe.plan.algorithms.cuts import Partition, shortest
from megapipe.plan.algorithms.judge import stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.recompute import cheapest_recomputation
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, Uniform, peak, positions, uniform_shapes

NONE = Partition(inf, inf)


def plan(problem: Problem) -> PlannedPipeline | None:
    found = [cut_in_two(problem, shape) for shape in uniform_shapes(problem)]
    best = shortest((each for each in found if each.slowest < inf), problem.microbatches)
    return None if best is None else best.plan(problem)


def cut_in_two(problem: Problem, shape: Uniform) -> Partition:
    """Return the cuts of a uniform pipeline with the fastest slowest stage among the tried ones."""
    stages, places = Stages(problem), positions(problem, halves=True)
    in_flight = problem.microbatches

    @cache
    def cut(low: int, high: int, count: int, after: int) -> Partition:
        """Cut units low to high - 1 into `count` stages, with `after` stages after them."""
        start = (shape.stages - after - count) * shape.devices
        if count == 1:
            whole, _ = stages(low, high, start, shape.devices, shape.tp)
            made = cheapest_recomputation(problem, whole, after)
            if made is None:
                return NONE
            load = stage_load(problem, made)
            seconds = load.forward + load.backward
            return Partition(seconds, seconds, (made, None))
        left, right = count // 2, count - count // 2
        inner = [at for at in places if low + left <= at <= high - right]

        def loads(at: int) -> tuple[float, float]:
            """Return how much longer, and larger, the left part's stages are than the right's."""
            a, b = (
                stages(*ends, start, shape.devices, shape.tp)[1] for ends in ((low, at), (at, high))
            )
            time = (a.forward + a.backward) / left - (b.forward + b.backward) / right
            more = peak(a, after + right + left // 2, in_flight)
            return time, more / left - peak(b, after + right // 2, in_flight) / right

        parts = [
            (cut(low, at, left, after + right), cut(at, high, right, after))
            for at in _between(inner, [loads(at) for at in inner])
        ]
        joined = (_joined(*both) for both in parts)
        return min(joined, key=lambda each: (each.slowest, each.total), default=NONE)

    return cut(0, problem.length, shape.stages, 0)


def _between(cuts: Sequence[int], loads: Sequence[tuple[float, float]]) -> Sequence[int]:
    """Return the cuts from the one that balances time to the one that balances memory. A balance
    lies between two cuts: the last one with a lighter left part, and the next one."""
    lighter = [sum(each[what] < 0 for each in loads) for what in (0, 1)]
    return cuts[max(0, min(lighter) - 1) : max(lighter) + 1]


def _joined(left: Partition, right: Partition) -> Partition:
    links = left.links
    for each in right.stages:
        links = each, links
    return Partition(left.total + right.total, max(left.slowest, right.slowest), links)


ALGORITHMS = (
    Algorithm(
        "dawnpiper",
        "DawnPiper (Peng et al., 2025)",
        "slowest stage with the recomputation that it needs, cuts within layers",
        plan,
    ),
)
