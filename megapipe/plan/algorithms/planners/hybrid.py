"""Planners whose stages choose replicas and a tensor-parallel degree: Piper, EffTra, Alpa's DP.

All three walk from the end of the chain, with the number of devices that are used so far, and of
stages, which leave micro-batches in flight. They differ in what counts.

- Piper (Tarnawski et al., NeurIPS'21): the slowest stage with its messages and its share of the
  reduction of gradients; a stage recomputes if it has to. On a chain, the downsets of Piper's graph
  are the chain's ends.
- EffTra: the time of a synchronous pipeline, whose messages make its start and
  its end longer; no recomputation.
- Alpa (Zheng et al., OSDI'22), the search between operators: the time of a synchronous pipeline
  without messages. A stage has a power of two devices of a node, or whole nodes. Here a stage's
  units are replicated or split as a whole; `alpa_inner` chooses by operator.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import product
from typing import NamedTuple

from megapipe.plan.algorithms.cuts import Partition, Step, partitions, widened
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Links, Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, period, positions


class Rules(NamedTuple):
    """Rules of a planner: costs that count, and choices that a stage has."""

    adds_up: bool
    """Whether the time of the first micro-batch counts, not the slowest stage alone."""
    messages: bool
    recomputes: bool
    submeshes: bool = False
    """Whether a stage has a power of two devices of a node, or whole nodes."""


class Used(NamedTuple):
    """Devices and stages from a cut to the end of the chain."""

    devices: int
    stages: int


def piper(problem: Problem) -> PlannedPipeline | None:
    return _plan(problem, Rules(adds_up=False, messages=True, recomputes=True))


def efftra(problem: Problem) -> PlannedPipeline | None:
    return _plan(problem, Rules(adds_up=True, messages=True, recomputes=False))


def alpa(problem: Problem) -> PlannedPipeline | None:
    rules = Rules(adds_up=True, messages=False, recomputes=True, submeshes=True)
    return _plan(problem, rules)


def _plan(problem: Problem, rules: Rules) -> PlannedPipeline | None:
    stages, m = Stages(problem), problem.microbatches
    found = widened(lambda limit: _within(stages, rules, limit), stages.least, m)
    return None if found is None else found.plan(problem)


def _within(stages: Stages, rules: Rules, limit: float) -> list[Partition]:
    """Return the best partitions whose slowest stage is within a limit."""
    problem = stages.problem
    links, total = problem.links, problem.devices

    shapes = list(product(problem.tensor_sizes, problem.replica_counts))

    def steps(last: int, first: int, used: Hashable) -> Iterator[Step]:
        assert isinstance(used, Used)
        end = total - used.devices
        own = stages.work[last] - stages.work[first]
        for tp, replicas in shapes:
            start = end - tp * replicas
            if start < 0 or (start == 0) != (first == 0):
                continue
            if stages.work[first] > limit * start or own > limit * (end - start):
                continue
            if rules.submeshes and not _is_submesh(links, start, end):
                continue
            sent = 0.0
            if rules.messages and first:
                size = problem.cost(first - 1, first, tp, replicas).message
                sent = 2 * size / links.speed(start - 1, start)
            for recompute in (False, True)[: 1 + rules.recomputes]:
                added, load = stages(first, last, start, tp * replicas, tp, recompute)
                if stages.fits(load, used.stages):
                    seconds = period(problem, load)
                    state = Used(total - start, used.stages + 1)
                    if rules.adds_up:
                        yield Step(state, seconds + sent, seconds, added)
                    else:
                        yield Step(state, 0.0, seconds + sent, added)
                    break

    found = partitions(positions(problem)[::-1], Used(0, 0), steps, limit)
    return [each for own in found.values() for each in own]


def _is_submesh(links: Links, start: int, end: int) -> bool:
    """Whether devices `start` to `end` - 1 are a power of two in one node, or whole nodes."""
    count, node = end - start, links.per_node
    if count < node:
        return count & (count - 1) == 0 and start // node == (end - 1) // node
    return count % node == 0 and start % node == 0


ALGORITHMS = (
    Algorithm(
        "piper",
        "Piper (Tarnawski et al., NeurIPS'21)",
        "slowest stage with its messages, within the memory of a device",
        piper,
        optimal=True,
    ),
    Algorithm(
        "efftra",
        "EffTra",
        "synchronous pipeline in closed form, with messages",
        efftra,
        optimal=True,
    ),
    Algorithm(
        "alpa",
        "Alpa, between operators (Zheng et al., OSDI'22)",
        "synchronous pipeline in closed form, stages on submeshes",
        alpa,
        optimal=True,
    ),
)
