"""DAPPLE's planner (Fan et al., PPoPP'21): cuts, replicas and their placement on nodes.

The next stage takes its devices in one of three ways: from nodes that are not used yet (fresh
first), from nodes that are used in part (append first), or evenly from all nodes with free devices
(scatter first). The latency of a synchronous pipeline is that of the first micro-batch, with
messages and the reduction of gradients, plus the intervals of the slowest stage, DAPPLE's pivot.
The judge chooses among the best few. It does not look at memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from itertools import islice

from megapipe.plan.algorithms.cuts import Partition, Step, partitions, widened
from megapipe.plan.algorithms.judge import judge, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, positions

TRIES = 10
"""Number of partitions that are simulated."""
MOST_NODES = 4
"""Number of nodes above which stages only take devices fresh first, as there are too many ways."""


def plan(problem: Problem) -> PlannedPipeline | None:
    stages, last = Stages(problem), list[Partition]()

    def search(limit: float) -> list[Partition]:
        last[:] = _within(stages, limit)
        return last

    m, (node, nodes) = problem.microbatches, _nodes(problem)
    if problem.replica_counts[-1] * (len(positions(problem)) - 1) < node * nodes:
        return None
    widened(search, stages.least, m)
    order = sorted(last, key=lambda each: each.seconds(m))[:TRIES]
    plans = [_on_nodes(problem, each.stages) for each in order]
    return min(plans, key=lambda each: judge(problem, each).seconds, default=None)


def _within(stages: Stages, limit: float) -> list[Partition]:
    """Return the best partitions whose slowest stage is within a limit. A state has the number of
    used workers of each node, the largest first, as nodes are alike."""
    problem, tp = stages.problem, stages.problem.tensor_sizes[0]
    node, nodes = _nodes(problem)

    @cache
    def made(first: int, last: int, used: Sequence[int], taken: Sequence[int]) -> Step:
        added = stage(first, last, _devices(node, tp, used, taken), tp)
        load, sent = stage_load(problem, added), _message(problem, first, used, taken)
        seconds = load.forward + load.backward
        after = tuple(sorted(map(sum, zip(used, taken, strict=True)), reverse=True))
        return Step(after, seconds + 2 * sent + load.reduce, max(seconds, sent), added)

    def steps(first: int, last: int, used: Hashable) -> Iterator[Step]:
        assert isinstance(used, tuple)
        free, rest = nodes * node - sum(used), stages.work[-1] - stages.work[last]
        for count in problem.replica_counts:
            left = (free - count) * tp
            if left < 0 or (left == 0) != (last == problem.length) or rest > limit * left:
                continue
            if stages.work[last] - stages.work[first] > limit * count * tp:
                continue
            cost = problem.cost(first, last, tp, count)
            if cost.forward + cost.backward > limit:
                continue
            for taken in islice(placements(used, node, count), None if nodes <= MOST_NODES else 1):
                yield made(first, last, used, taken)

    found = partitions(positions(problem), (0,) * nodes, steps, limit)
    return [each for own in found.values() for each in own]


def _nodes(problem: Problem) -> tuple[int, int]:
    """Return the number of workers of a node, and of nodes."""
    tp = problem.tensor_sizes[0]
    node = min(problem.links.per_node, problem.devices) // tp
    return node, problem.devices // (node * tp)


def _devices(node: int, tp: int, used: Sequence[int], taken: Sequence[int]) -> list[int]:
    """Return the devices of the next `taken` workers of each node, of which `used` are used."""
    return [
        (at * node + used[at] + worker) * tp + device
        for at, number in enumerate(taken)
        for worker in range(number)
        for device in range(tp)
    ]


def _on_nodes(problem: Problem, stages: Sequence[PlannedStage]) -> PlannedPipeline:
    """Return the plan of stages whose devices are on nodes in the order of a state. The first node
    of that order is the one with most used workers at the time."""
    (node, nodes), tp = _nodes(problem), problem.tensor_sizes[0]
    used, made = [0] * nodes, list[PlannedStage]()
    for each in stages:
        order = sorted(range(nodes), key=lambda at: -used[at])
        taken = [0] * nodes
        for device in each.devices[::tp]:
            taken[order[device // (node * tp)]] += 1
        made.append(each._replace(devices=tuple(_devices(node, tp, used, taken))))
        used = list(map(sum, zip(used, taken, strict=True)))
    return PlannedPipeline(tuple(made), problem.microbatches)


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


def _message(problem: Problem, first: int, used: Sequence[int], taken: Sequence[int]) -> float:
    """Return the seconds of a micro-batch's message to a stage: within nodes if the stage has
    workers of nodes that are used in part, else between nodes."""
    if not first:
        return 0.0
    links, tp = problem.links, problem.tensor_sizes[0]
    near = any(before and new for before, new in zip(used, taken, strict=True))
    size = problem.cost(first - 1, first, tp, sum(taken)).message
    return size / (links.inside if near else links.between) + links.latency


ALGORITHMS = (
    Algorithm(
        "dapple",
        "DAPPLE (Fan et al., PPoPP'21)",
        "synchronous pipeline with messages and reductions, three placements",
        plan,
    ),
)
