"""Training without a flush by every switch computes what the definitions say."""

from __future__ import annotations

import functools
import itertools
import random
from contextlib import nullcontext
from dataclasses import fields

import pytest

from megapipe.testing import World, run_world
from tests.parity.cases import Case
from tests.parity.pairs import Choice
from tests.parity.stale_matrix import ELSEWHERE, MATRIX, to_case
from tests.parity.stale_ranks import StaleOutcome, run_stale_cases
from tests.parity.stale_windows import check_windows
from tests.parity.traced_compiler import traced_blocks

WORLDS = (1, 2, 3, 4, 6, 8)


@functools.cache
def choices_of_pairs() -> list[Choice]:
    return MATRIX.covering(random.Random(0))


def of_world(world: int) -> list[Case]:
    cases = [to_case(choice) for choice in choices_of_pairs()]
    return [case for case in cases if case.world == world]


def run_traced(world: World, cases: list[Case]) -> list[StaleOutcome]:
    """Compiled blocks are traced, but not by inductor."""
    outcomes = []
    for case in cases:
        with traced_blocks() if case.compile else nullcontext():
            outcomes += run_stale_cases(world, [case])
    return outcomes


def check(cases: list[Case]) -> None:
    ranks = run_world(cases[0].world, run_traced, cases, timeout_s=60 + 20 * len(cases))
    for number, case in enumerate(cases):
        try:
            check_windows(case, [outcomes[number] for outcomes in ranks])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_pairs(world: int) -> None:
    check(of_world(world))


@pytest.mark.full
@pytest.mark.parametrize(("world", "number"), [(1, 2), (2, 1), (3, 1), (4, 2)])
def test_some_pairs(world: int, number: int) -> None:
    rng = random.Random(world)
    sizes = itertools.product(*(MATRIX.dimensions[name] for name in ("dp", "tp", "size")))
    given = [size for size in sizes if size[0] * size[1] * size[2][0] == world]
    choices = [
        MATRIX.varied(rng, {"dp": dp, "tp": tp, "size": size, "in_process": False})
        for dp, tp, size in rng.sample(given, number)
    ]
    check([to_case(choice) for choice in choices if choice is not None])


@pytest.mark.slow
def test_every_possible_pair_is_held() -> None:
    MATRIX.check_held(choices_of_pairs())
    assert {case.world for case in map(to_case, choices_of_pairs())} == {*WORLDS}


def test_every_switch_is_a_dimension() -> None:
    MATRIX.check_fields({field.name for field in fields(Case)}, ELSEWHERE)
