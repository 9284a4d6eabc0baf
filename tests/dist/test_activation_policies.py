"""Policies on tensor-parallel ranks: the reference's results, and the same bits with dropout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megapipe.testing import run_world
from tests.parity.checking import assert_same_bits
from tests.parity.ranks import OF_ALL_MODELS, Case, check_case, run_cases
from tests.parity.tiers import one_of

pytestmark = pytest.mark.full

SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2))
POLICIES = [name for name in OF_ALL_MODELS if name != "keep"]


def cases(world: int, schedules: Sequence[tuple[str, int]] = SCHEDULES) -> list[Case]:
    """Return every policy on every schedule; the variants take turns."""
    made = []
    for i, ((schedule, chunks), name) in enumerate(itertools.product(schedules, POLICIES)):
        made.append(
            Case(
                tp=world,
                pp=2,
                m=2,
                schedule=schedule,
                chunks=chunks,
                in_process=True,
                activations=name,
                sequence_parallel=(i + i // len(POLICIES)) % 2 == 0,
                model=("gpt2", "llama", "mixed", "gelu")[i % 4],
                layers=4,
            )
        )
    return made


@pytest.mark.slow
def test_every_policy_and_schedule_on_tensor_parallel_ranks() -> None:
    given = cases(2)
    results = run_world(2, run_cases, given, timeout_s=120)
    for i, case in enumerate(given):
        try:
            check_case(case, [outcomes[i] for outcomes in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


@one_of(8)
def test_over_a_wire(some: slice) -> None:
    given = [
        Case(pp=2, m=3, schedule="zb_h1", activations=name, layers=4, model="llama")
        for name in POLICIES[some]
    ]
    results = run_world(2, run_cases, given, timeout_s=120)
    for i, case in enumerate(given):
        check_case(case, [outcomes[i] for outcomes in results])


@one_of(6)
def test_dropout_is_the_same_bitwise(some: slice) -> None:
    """Norms that have one gradient for their input are recomputed to the same bits."""
    given = [
        replace(case, model="gpt2", dropout=0.2)
        for case in cases(2, SCHEDULES[::3])
        if "attention kept" not in case.activations
    ][some]
    plain = [replace(case, activations="keep") for case in given]
    unique = list(dict.fromkeys(plain))
    for outcomes in run_world(2, run_cases, [*given, *unique], timeout_s=120):
        of = dict(zip([*given, *unique], outcomes, strict=True))
        for case, kept in zip(given, plain, strict=True):
            assert_same_bits(of[case], of[kept], case.name)
