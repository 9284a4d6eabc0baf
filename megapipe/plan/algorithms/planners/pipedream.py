"""PipeDream's partitioner (Narayanan et al., SOSP'19): replicated stages on two levels of links.

The slowest stage is made as fast as possible. First within a node: for each range of units and
number of workers, the best pipeline at the speed of the node's links. Then between nodes, where
each stage is such a pipeline on all workers of a node, replicated over some nodes. A stage takes
the longer one of its computation and its reduction of gradients; a message between stages takes
part in the same maximum. PipeDream reduces after every micro-batch, but these pipelines once a
step, so a reduction counts with its share of a step. It does not look at memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from megapipe.plan.algorithms.cuts import Partition, Step, by_position, partitions
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import positions

Inner = dict[tuple[int, int], Partition]
"""Best pipeline on all workers of a node, by first unit and unit after the last."""


class Nested(NamedTuple):
    """A pipeline over nodes, whose stages are pipelines within a node."""

    outer: Partition
    inner: Mapping[int, Inner]
    """Pipelines within a node by the number of nodes that share micro-batches."""


def plan(problem: Problem) -> PlannedPipeline | None:
    found = nested(problem)
    if found is None:
        return None
    stages = [
        _over_nodes(each, outer.devices)
        for outer in found.outer.stages
        for each in found.inner[len(outer.devices)][outer.first, outer.last].stages
    ]
    return PlannedPipeline(tuple(stages), problem.microbatches)


def nested(problem: Problem) -> Nested | None:
    """Return the pipeline with the fastest slowest stage; None if there is none. A stage between
    nodes has the first device of each of its nodes."""
    tp, links = problem.tensor_sizes[0], problem.links
    node = min(links.per_node, problem.devices)
    nodes, places = problem.devices // node, positions(problem)
    inner = {n: _within(problem, n, node // tp) for n in range(1, nodes + 1)}

    def steps(last: int, first: int, used: Hashable) -> Iterator[Step]:
        assert isinstance(used, int)
        for n in range(1, nodes - used + 1):
            if (first, last) not in inner[n]:
                continue
            pipeline, start = inner[n][first, last], (nodes - used - n) * node
            devices = [start + node * k for k in range(n)]
            sync = links.all_reduce(problem.cost(first, last, tp).gradients, devices)
            sent = _message(problem, first, n, links.between) if used + n < nodes else 0.0
            slowest = max(pipeline.slowest, sync / problem.microbatches, sent)
            yield Step(used + n, 0.0, slowest, stage(first, last, devices))

    found = partitions(places[::-1], 0, steps).get(nodes)
    return Nested(found[0], inner) if found else None


def _within(problem: Problem, nodes: int, workers: int) -> Inner:
    """Plan the workers of a node for each range of units, if `nodes` nodes share micro-batches."""
    tp, links, places = problem.tensor_sizes[0], problem.links, positions(problem)

    sent = {first: _message(problem, first, nodes, links.inside) for first in places}
    counts = [n for n in range(1, workers + 1) if n * nodes in problem.replica_counts]

    @cache
    def made(first: int, last: int, begin: int, count: int) -> tuple[float, PlannedStage]:
        devices = range(begin * tp, (begin + count) * tp)
        cost = problem.cost(first, last, tp, count * nodes)
        sync = links.all_reduce(cost.gradients, devices[::tp]) / problem.microbatches
        slowest = max(cost.forward + cost.backward, sync)
        return slowest, stage(first, last, devices, tp)

    def steps(last: int, first: int, used: Hashable) -> Iterator[Step]:
        assert isinstance(used, int)
        for count in counts:
            begin = workers - used - count
            if begin >= 0:
                slowest, added = made(first, last, begin, count)
                yield Step(used + count, 0.0, max(slowest, sent[first] if begin else 0.0), added)

    found: Inner = {}
    for index in range(1, len(places)):
        back = places[index::-1]
        for first, states in zip(back, by_position(back, 0, steps), strict=True):
            if workers in states:
                found[first, places[index]] = states[workers][0]
    return found


def _message(problem: Problem, first: int, nodes: int, speed: float) -> float:
    """Return the seconds of the messages before a unit, there and back, for a micro-batch."""
    size = problem.cost(first - 1, first, problem.tensor_sizes[0], nodes).message if first else 0.0
    return 2 * size / speed


def _over_nodes(inner: PlannedStage, starts: tuple[int, ...]) -> PlannedStage:
    """Return a stage of a node's pipeline, replicated over the nodes with these first devices."""
    return inner._replace(devices=tuple(at + each for at in starts for each in inner.devices))


ALGORITHMS = (
    Algorithm(
        "pipedream",
        "PipeDream (Narayanan et al., SOSP'19)",
        "slowest stage, its reduction or its message, over two levels of links",
        plan,
        optimal=True,
    ),
)
