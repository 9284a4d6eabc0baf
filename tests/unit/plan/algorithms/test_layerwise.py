"""Planners that choose a degree for each unit, against brute force."""

from itertools import product

import numpy as np
import pytest

from megapipe.plan.algorithms.judge import resharding_seconds, stage_load
from megapipe.plan.algorithms.pipeline import PlannedStage, UnitChoice
from megapipe.plan.algorithms.planners.layerwise import (
    Tensors,
    between_bytes,
    halved,
    hypar,
    hypar_level,
    level_bytes,
    on_all,
    one_weird_trick,
    optcnn,
    step_tensors,
)
from megapipe.plan.algorithms.problem import ChainUnit, Links, Problem, UnitCost
from tests.unit.plan.algorithms.random_chains import random_units

LINKS = Links(inside=0.5, per_node=8)


@pytest.mark.parametrize("seed", range(4))
def test_optcnn_equals_brute_force_on_five_layers(seed: int) -> None:
    units = random_units(5, seed, (1, 2, 4), gradients=6.0)
    given = Problem(units, 4, 3, samples=4, links=LINKS)

    def seconds(sizes: tuple[int, ...]) -> float:
        stage = PlannedStage(0, tuple(map(UnitChoice, sizes)), (0, 1, 2, 3))
        loads = [
            stage_load(given, PlannedStage(unit, (choice,), stage.devices))
            for unit, choice in enumerate(stage.choices)
        ]
        moved = [sum(resharding_seconds(given, stage, unit)) for unit in range(4)]
        compute = sum(each.forward + each.backward for each in loads) + sum(moved)
        return 3 * compute + sum(each.reduce for each in loads)

    plan = optcnn(given)
    assert plan is not None
    found = tuple(choice.tp for choice in plan.stages[0].choices)
    least = min(map(seconds, product((1, 2, 4), repeat=5)))
    assert seconds(found) == pytest.approx(least)


def bytes_of(tensors: list[Tensors], splits: tuple[bool, ...]) -> float:
    """Return the bytes that a level exchanges."""
    own = sum(map(level_bytes, tensors, splits))
    return own + sum(map(between_bytes, tensors, splits, splits[1:]))


@pytest.mark.parametrize("seed", range(4))
def test_hypar_equals_brute_force_on_eight_layers_and_three_levels(seed: int) -> None:
    units = random_units(8, seed, (1, 2, 4, 8), gradients=2.0)
    given = Problem(units, 8, 3, samples=8, links=LINKS)
    tensors, sizes, total = step_tensors(given), [1] * 8, 0.0
    for level in range(3):
        chosen = hypar_level(tensors, [(False, True)] * 8)
        least = min(bytes_of(tensors, each) for each in product((False, True), repeat=8))
        assert bytes_of(tensors, tuple(chosen)) == pytest.approx(least)
        total += 2**level * least
        sizes = [size << split for size, split in zip(sizes, chosen, strict=True)]
        tensors = list(map(halved, tensors, chosen))
    assert hypar(given) == on_all(given, sizes)
    joint = _least_of_all_levels(step_tensors(given))
    print(f"HyPar's gap to the best choice for all levels at once: {total / joint - 1:.2%}")
    assert total >= joint * (1 - 1e-12)


def _least_of_all_levels(tensors: list[Tensors]) -> float:
    """Return the fewest bytes if a unit's choices for all three levels are made together."""
    choices = list(product((False, True), repeat=3))

    def own(unit: Tensors, chosen: tuple[bool, ...], after: tuple[bool, ...] | None) -> float:
        total = 0.0
        for level, split in enumerate(chosen):
            moved = 0.0 if after is None else between_bytes(unit, split, after[level])
            total += 2**level * (level_bytes(unit, split) + moved)
            unit = halved(unit, split)
        return total

    least = dict.fromkeys(choices, 0.0)
    for before in tensors[:-1]:
        least = {
            each: min(total + own(before, was, each) for was, total in least.items())
            for each in choices
        }
    return min(total + own(tensors[-1], each, None) for each, total in least.items())


def test_hypar_keeps_to_the_degrees_of_the_problem() -> None:
    given = Problem(random_units(4, 0, (1, 2), gradients=50.0), 8, 3, samples=8, links=LINKS)
    plan = hypar(given)
    assert plan is not None
    assert {choice.tp for choice in plan.stages[0].choices} == {2}


def test_one_weird_trick_splits_the_head_alone() -> None:
    def costs(gradients: float, message: float) -> dict[tuple[int, float], UnitCost]:
        return {
            (tp, 4): UnitCost(1 / tp, 1 / tp, 1 / tp, gradients=gradients / tp, message=message)
            for tp in (1, 2, 4)
        }

    body = [ChainUnit(f"convolution {n}", costs(1.0, 8.0)) for n in range(5)]
    head = [ChainUnit(f"fully connected {n}", costs(90.0, 1.0)) for n in range(3)]
    plan = one_weird_trick(Problem((*body, *head), 4, 2, samples=4, links=LINKS))
    assert plan is not None
    assert [choice.tp for choice in plan.stages[0].choices] == [1] * 5 + [4] * 3


def test_one_weird_trick_computes_the_gradients_of_one_device() -> None:
    """A replicated body and a split head have the same gradients as a model that is whole."""
    random = np.random.default_rng(0)
    x, body, head = (random.normal(size=size) for size in ((8, 5), (5, 6), (6, 4)))
    target = random.normal(size=(8, 4))
    hidden = x @ body
    output_grad = hidden @ head - target  # of half the squared error
    whole = x.T @ (output_grad @ head.T), hidden.T @ output_grad

    samples = [slice(0, 4), slice(4, 8)]  # of two replicas of the body
    columns = [slice(0, 2), slice(2, 4)]  # of two parts of the head
    gathered = np.concatenate([x[own] @ body for own in samples])
    grads = [gathered @ head[:, own] - target[:, own] for own in columns]
    parts = [grad @ head[:, own].T for grad, own in zip(grads, columns, strict=True)]
    summed = parts[0] + parts[1]
    reduced = sum(x[own].T @ summed[own] for own in samples)
    joined = np.concatenate([gathered.T @ grad for grad in grads], axis=1)
    np.testing.assert_allclose(reduced, whole[0], rtol=1e-12)
    np.testing.assert_allclose(joined, whole[1], rtol=1e-12)
