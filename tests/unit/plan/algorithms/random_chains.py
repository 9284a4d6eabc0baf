"""Random problems for the tests of planners, and all their plans."""

import itertools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random

from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.problem import ChainUnit, Links, Problem, UnitCost

SLOW = Links(inside=3.0, between=1.0, per_node=2)


def random_units(
    count: int, seed: int, tensor: Sequence[int] = (1,), gradients: float = 1.0
) -> tuple[ChainUnit, ...]:
    """Make units whose costs differ; tensor parallelism costs some time of its own."""
    random, found = Random(seed), []
    for index in range(count):
        seconds, weights, saved = random.uniform(1, 2), random.uniform(1, 3), random.uniform(1, 5)
        costs = {
            (tp, size): UnitCost(
                forward=size * (seconds / tp + 0.1 * (tp > 1)),
                input_grad=size * (seconds / tp + 0.1 * (tp > 1)),
                weight_grad=size * seconds / tp,
                recompute=size * seconds / tp,
                weights=weights / tp,
                states=2 * weights / tp,
                gradients=gradients * weights / tp,
                saved=size * saved / tp,
                saved_recompute=0.3 * size * saved / tp,
                message=0.1 * size,
            )
            for tp in tensor
            for size in (1, 2, 4)
        }
        found.append(ChainUnit(f"unit {index}", costs))
    return tuple(found)


def all_cuts(length: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield the ends of stages, from 0 to `length`."""
    for cuts in itertools.combinations(range(1, length), stages - 1):
        yield (0, *cuts, length)


def one_device_each(
    problem: Problem, ends: Sequence[int], recompute: Sequence[int] = ()
) -> PlannedPipeline:
    """Make a plan whose stages have one device each."""
    stages = [
        stage(first, last, [rank], recompute=recompute)
        for rank, (first, last) in enumerate(pairwise(ends))
    ]
    return PlannedPipeline(tuple(stages), problem.microbatches)


def random_inputs(count: int, random: Random, back: int = 4) -> list[tuple[int, ...]]:
    """Make a graph in which each operator has up to two inputs, not far before it."""
    found = []
    for node in range(count):
        near = range(max(0, node - back), node)
        found.append(tuple(sorted(random.sample(near, min(len(near), random.randint(1, 2))))))
    return found
