"""Every layout and every switch computes what the plain single-process reference computes."""

from __future__ import annotations

import functools
import itertools
import math
import random
from contextlib import nullcontext
from dataclasses import fields, replace

import pytest

from megapipe.testing import World, run_world
from tests.parity.marks import in_parts, some_or_all
from tests.parity.matrix import ELSEWHERE, LAYOUTS, MATRIX, SCHEDULES, layouts_in_full, to_case
from tests.parity.pairs import Choice
from tests.parity.ranks import Case, Outcome, check_case, configure, run_case
from tests.parity.traced_compiler import traced_blocks

WORLDS = (1, 2, 3, 4, 5, 8)


@functools.cache
def choices_of_pairs() -> list[Choice]:
    return MATRIX.covering(random.Random(0))


def run_traced(world: World, cases: list[Case]) -> list[Outcome]:
    """All cases of one world size; compiled blocks are traced, but not by inductor."""
    outcomes = []
    for case in cases:
        with traced_blocks() if case.compile else nullcontext():
            try:
                outcomes.append(run_case(world, case))
            except Exception as error:
                error.add_note(f"case: {case.name}")
                raise
    return outcomes


def check(cases: list[Case], world: int) -> None:
    cases = [case for case in cases if case.world == world]
    assert cases
    results = run_world(world, run_traced, cases, timeout_s=30 + 10 * len(cases))
    for i, case in enumerate(cases):
        try:
            check_case(case, [outcomes[i] for outcomes in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_pairs(world: int) -> None:
    check([to_case(choice) for choice in choices_of_pairs()], world)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "number"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 2)], ids=list("12345")
)
def test_some_pairs(world: int, number: int) -> None:
    rng = random.Random(world)
    layouts = [layout for layout in LAYOUTS if math.prod(layout) == world]
    given = itertools.islice(itertools.cycle(rng.sample(layouts, len(layouts))), number)
    choices = [MATRIX.varied(rng, {"layout": layout}) for layout in given]
    check([to_case(choice) for choice in choices if choice is not None], world)


@pytest.mark.slow
def test_every_possible_pair_is_held() -> None:
    MATRIX.check_held(choices_of_pairs())


def test_every_switch_is_a_dimension() -> None:
    MATRIX.check_fields({field.name for field in fields(Case)}, ELSEWHERE)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_full_product(world: int) -> None:
    cases = [to_case(choice) for choice in layouts_in_full(random.Random(1))]
    check([replace(case, steps=3) for case in cases], world)


LONG = [
    # what a run does by default: exact, with real processes, ZeRO-1
    Case(dp=2, tp=2, pp=2, chunks=2, m=4, schedule="interleaved_1f1b", layers=4, steps=20),
    Case(dp=2, pp=2, zero=3, chunks=2, m=4, schedule="interleaved_1f1b", tied=False, steps=20),
]
LARS = Case(dp=2, tp=2, zero=2, m=1, rule="lars", sequence_parallel=True, layers=2, steps=20)
UNEVEN_SLICES = [
    Case(pp=2, m=3, schedule="seq1f1b", slices=3, sequence=22, model="llama", masked=0.3),
    Case(tp=2, m=2, schedule="seq1f1b", slices=3, sequence=22, sequence_parallel=True),
]


@in_parts("world", [4, 8], default=[8])
def test_many_steps(world: int) -> None:
    check(LONG, world)


def test_many_steps_of_lars() -> None:
    """Its trust ratios are of whole matrices, of which a rank owns slices."""
    check([LARS], LARS.world)


def test_slices_of_uneven_length() -> None:
    for case in UNEVEN_SLICES:
        lengths = configure(case)[1].slice_lengths
        assert len(set(lengths)) > 1, lengths
    check(UNEVEN_SLICES, 2)


@some_or_all(4)
def test_in_process_pipeline_with_real_tensor_and_data_parallel_groups(some: slice) -> None:
    """pp4 in one process per (dp, tp) coordinate, for every schedule."""
    cases = [
        Case(
            dp=2,
            tp=2,
            pp=4,
            m=5,
            schedule=schedule,
            chunks=chunks,
            in_process=True,
            sequence_parallel=True,
            layers=4 * chunks,
            masked=0.3,
        )
        for schedule, chunks in SCHEDULES[some]
    ]
    check(cases, 4)


def test_holders_of_a_stage_in_one_process() -> None:
    """Its gradients are complete when the last of the pipeline ranks here is through with them."""
    base = Case(dp=2, pp=4, m=4, in_process=True, masked=0.3)
    check([replace(base, schedule="chimera", zero=zero) for zero in range(4)], 2)
