"""Halving a program again and again, beside trying all halvings together."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from examples.sharding.bisection import bisect, exhaustive
from examples.sharding.execute import error
from examples.sharding.plan import planned_traffic
from examples.sharding.program import Program


def chains(count: int) -> list[tuple[int, ...]]:
    numbers = random.Random(0)
    return [tuple(numbers.choice((4, 8, 16, 32, 64)) for _ in range(4)) for _ in range(count)]


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
    """That is why more than one is kept."""
    program = products(16, 64, 64, 8, 16)
    one, four = (planned_traffic(bisect(program, 2, width)).bytes for width in (1, 4))
    assert one > four == planned_traffic(exhaustive(program, 2)).bytes


def test_eight_devices(products: Callable[..., Program]) -> None:
    program = products(64, 16, 32, 8)
    plan = bisect(program, 3)
    assert len(plan.mesh.devices) == 8
    assert error(plan, program.random_inputs()) < 1e-12
