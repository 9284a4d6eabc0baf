"""DAPPLE's planner (Fan et al., PPoPP'21): cuts, replicas and their placement on nodes.

The next stage takes its devices in one of three ways: from nodes that are not used yet (fresh
first), from nodes that are used in part (append first), or evenly from all nodes with free devices
(scatter first). The latency of a synchronous pipeline is that of the first micro-batch, with
messages and the reduction of gradients, plus the intervals of the slowest stage, DAPPLE's pivot.
The judge chooses among the best few. It does not look at memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from megapipe.plan.algorithms.cuts import Partition, Step, partitions, widened
from megapipe.plan.algorithms.judge import stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, positions, shortest_simulated


class Taken(NamedTuple):
    """What the stages so far use."""

    used: tuple[int, ...]
    """Numbers of workers by node."""
    last: tuple[int, ...]
    """Devices of the last stage."""


def plan(problem: Problem) -> PlannedPipeline | None:
    stages, last = Stages(problem), list[Partition]()

    def search(limit: float) -> list[Partition]:
        last[:] = _within(stages, limit)
        return last

    widened(search, stages.least, problem.microbatches)
    best = shortest_simulated(last, problem, tries=10)
    return None if best is None else best.plan(problem)


def _within(stages: Stages, limit: float) -> list[Partition]:
    """Return the best partitions whose slowest stage is within a limit."""
    problem, tp = stages.problem, stages.problem.tensor_sizes[0]
    node = min(problem.links.per_node, problem.devices) // tp
    nodes = problem.devices // (node * tp)

    def steps(first: int, last: int, state: Hashable) -> Iterator[Step]:
        assert isinstance(state, Taken)
        used, before = state
        free = nodes * node - sum(used)
        rest = stages.work[-1] - stages.work[last]
        for count in problem.replica_counts:
            left = (free - count) * tp
            if left < 0 or (left == 0) != (last == problem.length) or rest > limit * left:
                continue
            for taken in placements(used, node, count):
                devices = [
                    (at * node + used[at] + k) * tp + t
                    for at, number in enumerate(taken)
                    for k in range(number)
                    for t in range(tp)
                ]
                added = stage(first, last, devices, tp)
                load = stage_load(problem, added)
                sent = _message(problem, before, added)
                seconds = load.forward + load.backward
                total = seconds + 2 * sent + load.reduce
                after = tuple(a + b for a, b in zip(used, taken, strict=True))
                yield Step(Taken(after, added.devices), total, max(seconds, sent), added)

    found = partitions(positions(problem), Taken((0,) * nodes, ()), steps, limit)
    return [each for own in found.values() for each in own]


def placements(used: Sequence[int], node: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield the different placements of `count` workers: how many on each node of `node` workers,
    if `used` are used."""
    nodes = range(len(used))
    fresh = sorted(nodes, key=lambda at: (used[at] > 0, at))
    append = sorted(nodes, key=lambda at: (used[at] == 0, at))
    found = [_in_order(order, used, node, count) for order in (fresh, append)]
    found.append(_scattered(used, node, count))
    yield from dict.fromkeys(found)


def _in_order(order: Sequence[int], used: Sequence[int], node: int, count: int) -> tuple[int, ...]:
    taken = [0] * len(used)
    for at in order:
        taken[at] = min(node - used[at], count)
        count -= taken[at]
    return tuple(taken)


def _scattered(used: Sequence[int], node: int, count: int) -> tuple[int, ...]:
    taken = [0] * len(used)
    while count:
        room = [at for at in range(len(used)) if used[at] + taken[at] < node]
        for at in room[:count]:
            taken[at] += 1
        count -= min(count, len(room))
    return tuple(taken)


def _message(problem: Problem, before: Sequence[int], after: PlannedStage) -> float:
    """Return the seconds of a micro-batch's message from the devices `before` to a stage."""
    if not before:
        return 0.0
    tp, unit = after.choices[0].tp, after.first - 1
    replicas = min(len(before) // tp, after.replicas(after.first))
    size = problem.cost(unit, unit + 1, tp, replicas).message
    return problem.links.message(size, before[::tp], after.devices[::tp])


ALGORITHMS = (
    Algorithm(
        "dapple",
        "DAPPLE (Fan et al., PPoPP'21)",
        "synchronous pipeline with messages and reductions, three placements",
        plan,
    ),
)
