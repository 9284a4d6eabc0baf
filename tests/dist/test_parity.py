"""Every layout and every switch computes what the plain single-process reference computes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.parity.case_file import drawn, read
from tests.parity.matrix import SCHEDULES, layouts_in_full, to_case
from tests.parity.pair_runs import (
    MATRICES,
    case_of,
    check_cases,
    check_pairs,
    choice_of,
    impossible_pairs,
)
from tests.parity.ranks import Case, configure
from tests.parity.tiers import in_parts, one_of

WORLDS = (1, 2, 3, 4, 5, 6, 8)


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
def test_drawn_pairs(world: int, chosen: list[str]) -> None:
    """Some of the cases that between them hold every pair of values, others for each commit."""
    cases = [case for case in read("parity")[0] if case.id in chosen] or drawn("parity")
    here = [case for case in cases if case_of("parity", case).world == world]
    if not here:
        pytest.skip(f"none of the cases has {world} ranks")
    check_pairs("parity", here)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_pairs(world: int) -> None:
    cases = [case for case in read("parity")[0] if case_of("parity", case).world == world]
    check_pairs("parity", cases)


def test_the_file_of_cases_holds_every_pair() -> None:
    pairs, (cases, _) = MATRICES["parity"].pairs, read("parity")
    choices = [choice_of("parity", case) for case in cases]
    pairs.check_held(choices, impossible_pairs("parity"))
    assert {case_of("parity", case).world for case in cases} == {*WORLDS}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_full_product(world: int) -> None:
    cases = [to_case(choice) for choice in layouts_in_full(random.Random(1))]
    check([replace(case, steps=3) for case in cases], world)


def check(cases: list[Case], world: int) -> None:
    check_cases([case for case in cases if case.world == world])


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


@pytest.mark.full
def test_many_steps_of_lars() -> None:
    """LARS takes trust ratios of whole matrices, but a rank owns shards of them."""
    check([LARS], LARS.world)


def test_slices_of_uneven_length() -> None:
    for case in UNEVEN_SLICES:
        lengths = configure(case)[1].slice_lengths
        assert len(set(lengths)) > 1, lengths
    check(UNEVEN_SLICES, 2)


@one_of(4)
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
            slices=slices,
            in_process=True,
            sequence_parallel=True,
            layers=4 * chunks,
            masked=0.3,
        )
        for schedule, chunks, slices in SCHEDULES[some]
    ]
    check(cases, 4)


def test_holders_of_a_stage_in_one_process() -> None:
    """A stage's gradients are complete when the last of this process's pipeline ranks is through
    with them."""
    base = Case(dp=2, pp=4, m=4, in_process=True, masked=0.3)
    check([replace(base, schedule="chimera", zero=zero) for zero in range(4)], 2)
