"""SPP: order devices by minimum cuts, cut the chain, and schedule tasks by a list (Luo et al.,
2204.10562).

Devices are split in two where the bandwidth between both sides is least, and each side is split in
the same way, so neighbours in the order have fast links. A dynamic program gives each stage some
units and the next devices of the order. The list puts the tasks of micro-batches in the order in
which a cyclic pipeline runs them: with a period W that each rank and each link needs at most for a
micro-batch, task k of micro-batch j is in period j + k. A micro-batch passes 4S - 3 periods through
S stages (forward, links, and back), so m micro-batches take at most (m + 4S - 4) W, and at least m
W. Run as early as possible, the same order takes no longer. The cuts do not depend on memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from megapipe.plan.algorithms.cuts import Partition, Step, partitions
from megapipe.plan.algorithms.device_order import by_minimum_cuts
from megapipe.plan.algorithms.judge import judge, message_seconds, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import period, positions
from megapipe.schedule.ir import Kind, Schedule, pack, packed
from megapipe.schedule.placement import loop


class Placed(NamedTuple):
    """Workers of the stages so far."""

    workers: int
    """Number of workers."""
    last: int
    """Number of workers of the last stage."""


class PlannedList(NamedTuple):
    """A pipeline with its period."""

    stages: tuple[PlannedStage, ...]
    period: float
    """Seconds that each rank, and each link both ways, needs at most for a micro-batch."""

    def bound(self, microbatches: int) -> float:
        """Return the seconds that a step takes at most."""
        return (microbatches + 4 * len(self.stages) - 4) * self.period


def list_schedule(stages: int, microbatches: int) -> Schedule:
    """Return the order of a cyclic pipeline: rank s runs the forward of micro-batch j in period
    j + 2s and its backward in period j + 4(S - 1) - 2s."""
    lists = []
    for rank in range(stages):
        back = 4 * (stages - 1) - 2 * rank
        tasks = [(j + 2 * rank, 0, Kind.F, j) for j in range(microbatches)]
        tasks += [(j + back, 1, Kind.B, j) for j in range(microbatches)]
        lists.append(packed(pack(kind, rank, j) for _, _, kind, j in sorted(tasks)))
    return Schedule("list", loop(stages), microbatches, tuple(lists))


def partition(problem: Problem, workers: Sequence[int]) -> PlannedList | None:
    """Cut the chain into stages on the next workers of an order each, with the least bound; None if
    replicas cannot share the micro-batches. A worker is a number of devices with tensor
    parallelism."""
    tp = problem.tensor_sizes[0]

    @cache
    def made(first: int, last: int, start: int, count: int) -> tuple[PlannedStage, float]:
        own = workers[start : start + count]
        added = stage(first, last, [each * tp + k for each in own for k in range(tp)], tp)
        return added, period(problem, stage_load(problem, added))

    def steps(first: int, last: int, state: Hashable) -> Iterator[Step]:
        assert isinstance(state, Placed)
        for count in problem.replica_counts:
            used = state.workers + count
            if used > len(workers) or (used == len(workers)) != (last == problem.length):
                continue
            added, slowest = made(first, last, state.workers, count)
            if first:
                before, _ = made(first - 1, first, state.workers - state.last, state.last)
                slowest = max(slowest, 2 * message_seconds(problem, before, added))
            yield Step(Placed(used, count), 1.0, slowest, added)

    def bound(found: Partition) -> float:
        return PlannedList(found.stages, found.slowest).bound(problem.microbatches)

    states = partitions(positions(problem), Placed(0, 0), steps)
    best = min((each for found in states.values() for each in found), key=bound, default=None)
    return best and PlannedList(best.stages, best.slowest)


def ordered_workers(problem: Problem) -> list[int]:
    """Return the workers in the order of minimum cuts. Without a matrix of bandwidths the devices
    of a node are neighbours already."""
    tp = problem.tensor_sizes[0]
    workers = list(range(problem.devices // tp))
    if problem.links.matrix is None:
        return workers
    return by_minimum_cuts(workers, lambda a, b: problem.links.speed(a * tp, b * tp))


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the pipeline of the ordered devices with the list's schedule if it fits, else with
    1F1B, which has fewer micro-batches in flight."""
    found = partition(problem, ordered_workers(problem))
    if found is None:
        return None
    count = problem.microbatches
    orders = (list_schedule(len(found.stages), count), "1f1b")
    plans = (PlannedPipeline(found.stages, count, order) for order in orders)
    return next((each for each in plans if judge(problem, each).fits), None)


ALGORITHMS = (
    Algorithm(
        "spp",
        "SPP (Luo et al., 2204.10562)",
        "bound of a list schedule's step time",
        plan,
    ),
)
