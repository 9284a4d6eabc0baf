"""Costs of stages, uniform pipelines and balanced cuts, which planners of pipelines share."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from megapipe.plan.algorithms.cuts import Partition, Step, partitions, widened
from megapipe.plan.algorithms.judge import StageLoad, judge, stage_load
from megapipe.plan.algorithms.pipeline import PlannedStage, stage
from megapipe.plan.algorithms.problem import Problem


class Stages:
    """Stages of a problem on consecutive devices, with their costs, each computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._found: dict[tuple[int, int, int, int, int, bool], tuple[PlannedStage, StageLoad]] = {}

    def __call__(
        self, first: int, last: int, start: int, count: int, tp: int, recompute: bool = False
    ) -> tuple[PlannedStage, StageLoad]:
        """Return the stage of units `first` to `last` - 1 on `count` devices from `start` on, and
        its costs."""
        key = first, last, start, count, tp, recompute
        if key not in self._found:
            made = stage(first, last, range(start, start + count), tp, recompute)
            self._found[key] = made, stage_load(self.problem, made)
        return self._found[key]

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Least device-seconds of a micro-batch in the units before each position."""
        problem, found = self.problem, [0.0]
        for unit in range(problem.length):
            each = (
                (tp * replicas, problem.cost(unit, unit + 1, tp, replicas))
                for tp in problem.tensor_sizes
                for replicas in problem.replica_counts
            )
            least = min(devices * (cost.forward + cost.backward) for devices, cost in each)
            found.append(found[-1] + least)
        return tuple(found)

    @property
    def least(self) -> float:
        """Lower bound of the seconds between two micro-batches of the slowest stage."""
        return self.work[-1] / self.problem.devices

    def fits(self, load: StageLoad, after: int) -> bool:
        """Whether a stage with `after` stages after it fits its devices in 1F1B."""
        return peak(load, after, self.problem.microbatches) <= self.problem.memory


def peak(load: StageLoad, after: int, microbatches: int) -> float:
    """Return the peak bytes in 1F1B: as many micro-batches are in flight as there are stages from
    this one to the last."""
    return load.fixed + min(microbatches, after + 1) * load.saved + load.rebuilt


def period(problem: Problem, load: StageLoad) -> float:
    """Return the seconds between two micro-batches of a stage, with each one's part of the
    reduction of gradients."""
    return load.forward + load.backward + load.reduce / problem.microbatches


def positions(problem: Problem, *, halves: bool = False) -> tuple[int, ...]:
    """Return the ends and the cuts of the chain, ascending. `halves`: also cuts that the trainer
    cannot make."""
    tried = problem.block_cuts if problem.tried is None else problem.tried
    inner = range(1, problem.length) if halves else tried
    return (0, *inner, problem.length)


class Uniform(NamedTuple):
    """A pipeline whose stages have equally many devices."""

    stages: int
    replicas: int
    tp: int

    @property
    def devices(self) -> int:
        """Number of devices of a stage."""
        return self.replicas * self.tp


def uniform_shapes(problem: Problem, sizes: Sequence[int] | None = None) -> Iterator[Uniform]:
    """Yield the uniform pipelines on all devices, with the tensor-parallel degrees `sizes`
    (default: the smallest one), the longest pipelines first."""
    most = min(problem.devices, len(positions(problem)) - 1)
    for tp in sizes or problem.tensor_sizes[:1]:
        for count in range(most, 0, -1):
            replicas, rest = divmod(problem.devices, tp * count)
            if not rest and replicas in problem.replica_counts:
                yield Uniform(count, replicas, tp)


def shortest_simulated(
    found: Iterable[Partition], problem: Problem, tries: int = 5
) -> Partition | None:
    """Return the partition whose pipeline the judge finds the fastest, among the `tries` best ones
    in closed form; None if there is none."""
    order = sorted(found, key=lambda each: each.seconds(problem.microbatches))
    return min(
        order[:tries], key=lambda each: judge(problem, each.plan(problem)).seconds, default=None
    )


def balanced(stages: Stages, shape: Uniform, *, halves: bool = False) -> Sequence[PlannedStage]:
    """Return the stages of a uniform pipeline whose slowest stage is as fast as possible; [] if
    there are too few units."""

    def within(limit: float) -> list[Partition]:
        def steps(last: int, first: int, after: Hashable) -> Iterator[Step]:
            assert isinstance(after, int)
            start = (shape.stages - after - 1) * shape.devices
            own = stages.work[last] - stages.work[first]
            if start >= 0 and own <= limit * shape.devices and stages.work[first] <= limit * start:
                added, load = stages(first, last, start, shape.devices, shape.tp)
                yield Step(after + 1, 0.0, load.forward + load.backward, added)

        return partitions(places, 0, steps, limit).get(shape.stages, [])

    places = positions(stages.problem, halves=halves)[::-1]
    found = widened(within, stages.least, 2)
    return [] if found is None else found.stages
