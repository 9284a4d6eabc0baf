"""Planners that choose data or tensor parallelism for each unit, on all devices at once.

Without a pipeline, a unit's degree decides what it computes and what it exchanges: replicas reduce
gradients, and neighbours of different degrees move samples between their devices.

- OptCNN (Jia et al., ICML'18) minimizes the time of a step. Its graph eliminations of a chain are a
  dynamic program over units and their choices.
- HyPar (Song et al., HPCA'19) minimizes bytes. For each level of a binary hierarchy of devices,
  the outermost first, each unit is replicated or split over the two halves.
- "One weird trick" (Krizhevsky, 2014): units whose weights are larger than their outputs are split,
  as fully connected layers were; the others are replicated, as convolutions were.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from megapipe.plan.algorithms.cuts import Step, partitions, shortest
from megapipe.plan.algorithms.judge import resharding_seconds, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, UnitChoice, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm


def optcnn(problem: Problem) -> PlannedPipeline | None:
    devices, m, sizes = tuple(range(problem.devices)), problem.microbatches, degrees(problem)

    def steps(at: int, after: int, before: Hashable) -> Iterator[Step]:
        for tp in sizes if after == at + 1 else ():
            load = stage_load(problem, made := stage(at, after, devices, tp))
            seconds = m * (load.forward + load.backward) + load.reduce
            if at:
                assert isinstance(before, int)
                both = PlannedStage(at - 1, (UnitChoice(before), UnitChoice(tp)), devices)
                seconds += m * sum(resharding_seconds(problem, both, at - 1))
            yield Step(tp, seconds, 0.0, made)

    found = partitions(range(problem.length + 1), 0, steps).values()
    best = shortest((each for own in found for each in own), 1)
    return None if best is None else on_all(problem, [each.choices[0].tp for each in best.stages])


def degrees(problem: Problem) -> Sequence[int]:
    """Return the tensor-parallel degrees that a unit can have on all devices."""
    return [
        tp
        for tp in problem.tensor_sizes
        if problem.devices % tp == 0 and problem.devices // tp in problem.replica_counts
    ]


def on_all(problem: Problem, sizes: Sequence[int]) -> PlannedPipeline:
    """Return the plan with a single stage whose units have these tensor-parallel degrees."""
    choices = tuple(map(UnitChoice, sizes))
    whole = PlannedStage(0, choices, tuple(range(problem.devices)))
    return PlannedPipeline((whole,), problem.microbatches)


class Tensors(NamedTuple):
    """Bytes of a unit on the devices that a level of the hierarchy divides."""

    gradients: float
    output: float
    """Bytes of the unit's outputs in a step; their gradients have as many."""


def hypar(problem: Problem) -> PlannedPipeline | None:
    levels = problem.devices.bit_length() - 1
    if problem.devices != 1 << levels or 1 not in problem.tensor_sizes:
        return None
    tensors, sizes, allowed = step_tensors(problem), [1] * problem.length, degrees(problem)
    least, most = min(allowed, default=0), max(allowed, default=0)
    for level in range(levels):
        below = 1 << (levels - level - 1)
        can = [
            [split for split in (False, True) if least <= (size << split) * below] for size in sizes
        ]
        can = [
            [split for split in own if size << split <= most]
            for size, own in zip(sizes, can, strict=True)
        ]
        if not all(can):
            return None
        chosen = hypar_level(tensors, can)
        sizes = [size << split for size, split in zip(sizes, chosen, strict=True)]
        tensors = [halved(*both) for both in zip(tensors, chosen, strict=True)]
    return on_all(problem, sizes)


def step_tensors(problem: Problem) -> list[Tensors]:
    """Return the bytes of each unit in a step, if nothing is divided."""
    costs = [problem.cost(unit, unit + 1) for unit in range(problem.length)]
    return [Tensors(each.gradients, problem.microbatches * each.message) for each in costs]


def hypar_level(tensors: Sequence[Tensors], allowed: Sequence[Sequence[bool]]) -> list[bool]:
    """Return whether each unit is split, not replicated, over the two halves of a level, such that
    the fewest bytes are exchanged."""
    least = {split: (level_bytes(tensors[0], split), [split]) for split in allowed[0]}
    for (before, own), options in zip(pairwise(tensors), allowed[1:], strict=True):
        least = {
            split: min(
                (
                    total + between_bytes(before, was, split) + level_bytes(own, split),
                    [*ways, split],
                )
                for was, (total, ways) in least.items()
            )
            for split in options
        }
    return min(least.values())[1]


def level_bytes(tensors: Tensors, split: bool) -> float:
    """Return the bytes that a unit's halves exchange: partial outputs, or gradients."""
    return tensors.output if split else tensors.gradients


def between_bytes(before: Tensors, was_split: bool, is_split: bool) -> float:
    """Return the bytes exchanged between two units: the parts of the outputs, or of their
    gradients, that are on the other half (HyPar's table of transitions)."""
    if not was_split:
        return before.output / 2 if is_split else 0.0
    return before.output / 2


def halved(tensors: Tensors, split: bool) -> Tensors:
    """Return a unit's bytes on a half: a split halves its weights, replicas halve its samples."""
    if split:
        return tensors._replace(gradients=tensors.gradients / 2)
    return tensors._replace(output=tensors.output / 2)


def one_weird_trick(problem: Problem) -> PlannedPipeline | None:
    sizes = degrees(problem)
    if not sizes:
        return None
    large = [each.gradients > each.output for each in step_tensors(problem)]
    return on_all(problem, [sizes[-1] if each else sizes[0] for each in large])


ALGORITHMS = (
    Algorithm(
        "optcnn",
        "OptCNN (Jia et al., ICML'18)",
        "time of a step, a degree for each unit",
        optcnn,
        optimal=True,
    ),
    Algorithm(
        "hypar",
        "HyPar (Song et al., HPCA'19)",
        "bytes exchanged, level by level",
        hypar,
    ),
    Algorithm(
        "one_weird_trick",
        "One weird trick (Krizhevsky, 2014)",
        "nothing: a rule by the sizes of weights and outputs",
        one_weird_trick,
    ),
)
