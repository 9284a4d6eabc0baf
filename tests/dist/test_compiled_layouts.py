"""Compiled blocks in every kind of layout: collectives are part of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megapipe.testing import World, run_world
from tests.parity.ranks import Case, Outcome, check_case, run_cases
from tests.parity.traced_compiler import traced_blocks

CASES = [
    Case(tp=2, compile=True),
    Case(
        tp=2,
        pp=2,
        in_process=True,
        schedule="zb_h1",
        sequence_parallel=True,
        model="llama",
        documents=True,
        activations="full",
        compile=True,
    ),
    Case(dp=2, pp=2, chunks=2, in_process=True, schedule="interleaved_1f1b", zero=3, compile=True),
    Case(pp=2, m=3, schedule="zb_h1", model="mixed", activations="stage", compile=True),
    Case(cp=2, model="llama", moe="capacity, position", compile=True),
]
COUNTED = [
    Case(cp=2, model="llama", m=2, compile=True),
    Case(moe="shared, gated", model="gemma", activations="stage", compile=True),
    Case(
        tp=2, ep=2, sequence_parallel=True, moe="groups", model="neox", layers=3, compile=True,
        masked=0.3,
    ),
]  # fmt: skip
"""Two graphs a block, around attention; some layers have experts, and graphs end before these."""


def run_traced(world: World, cases: Sequence[Case]) -> tuple[list[Outcome], list[int]]:
    """By graphs that are traced with their backward, and run uncompiled; and their numbers."""
    outcomes, numbers = [], []
    for case in cases:
        with traced_blocks() as graphs:
            outcomes += run_cases(world, [case])
        numbers.append(len(graphs))
    return outcomes, numbers


@pytest.mark.slow
def test_traced_blocks_in_every_kind_of_layout() -> None:
    results = run_world(2, run_traced, CASES, timeout_s=120)
    for i, case in enumerate(CASES):
        check_case(case, [outcomes[i] for outcomes, _ in results])
        for _, numbers in results:
            assert 2 <= numbers[i] <= 5, "one to train, one to validate, others if run again"


@pytest.mark.full
@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_graphs_of_a_block(case: Case) -> None:
    results = run_world(case.world, run_traced, [case], timeout_s=120)
    check_case(case, [outcomes[0] for outcomes, _ in results])
    for _, numbers in results:
        assert numbers == [4], "two to train, two to validate or to run again"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inductor_in_every_kind_of_layout(case: Case) -> None:
    check_case(case, [outcomes[0] for outcomes in run_world(2, run_cases, [case], timeout_s=600)])
