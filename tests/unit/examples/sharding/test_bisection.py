"""Halving a program again and again, beside trying all halvings together."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from examples.sharding.bisection import bisect, exhaustive
from examples.sharding.execute import error
from examples.sharding.plan import planned_traffic
from examples.sharding.program import Program


def chains(count: int, products: tuple[int, ...] = (2,)) -> list[tuple[int, ...]]:
    """Return the lengths between which random chains of a number of products run."""
    numbers = random.Random(0)
    lengths = (4, 8, 16, 32, 64)
    return [
        tuple(numbers.choice(lengths) for _ in range(numbers.choice(products) + 2))
        for _ in range(count)
    ]


@pytest.mark.parametrize("lengths", [*chains(12), (32, 4, 64, 32, 16)], ids=str)
def test_four_devices_send_as_few_bytes_as_brute_force_finds(
    lengths: tuple[int, ...], products: Callable[..., Program]
) -> None:
    program = products(*lengths)
    found, best = bisect(program, 2, width=4), exhaustive(program, 2)
    assert planned_traffic(found).bytes == planned_traffic(best).bytes
    tensors = program.random_inputs()
    assert error(found, tensors) < 1e-12
    assert error(best, tensors) < 1e-12
    assert all(place.kind == "S" for places in found.inputs.values() for place in places)


def test_the_best_first_halving_may_belong_to_no_best_plan(
    products: Callable[..., Program],
) -> None:
    """So more than one is kept."""
    program = products(16, 64, 64, 8, 16)
    one, four = (planned_traffic(bisect(program, 2, width)).bytes for width in (1, 4))
    assert one > four == planned_traffic(exhaustive(program, 2)).bytes


def test_eight_devices(products: Callable[..., Program]) -> None:
    program = products(64, 16, 32, 8)
    plan = bisect(program, 3)
    assert len(plan.mesh.devices) == 8
    assert error(plan, program.random_inputs()) < 1e-12


@pytest.mark.slow
def test_the_figures_of_the_page(products: Callable[..., Program]) -> None:
    ratios: dict[int, list[float]] = {1: [], 4: []}
    for lengths in chains(40, (2, 3)):
        program = products(*lengths)
        best = planned_traffic(exhaustive(program, 2)).bytes
        for width, own in ratios.items():
            own.append(planned_traffic(bisect(program, 2, width)).bytes / best)
    assert ratios[1].count(1.0) == 29
    assert round(100 * max(ratios[1])) == 138
    assert ratios[4] == [1.0] * 40
