"""Families train under schedules that slice, fold or mirror the pipeline: loss, every gradient,
norm and weights of a single process, in fp64.

Between them they have a scaled embedding, attention biased by distance, blocks whose halves are
parallel, partial rotation with yarn, and norms of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.testing import run_world
from tests.parity.ranks import Case, check_case, run_cases

pytestmark = pytest.mark.full

FAMILIES = ("gemma", "bloom", "neox", "qwen")
ON_TWO = Case(pp=2, layers=4)
SCHEDULES = (
    replace(ON_TWO, schedule="seq1f1b", slices=2, sequence=12, masked=0.3),
    replace(ON_TWO, schedule="terapipe", slices=3, sequence=12, activations="full", documents=True),
    replace(ON_TWO, schedule="zb_v"),
    replace(ON_TWO, schedule="dualpipe", m=4, activations="selective"),
)
CASES = [
    pytest.param(
        replace(case, model=family),
        id=f"{family}-{case.schedule}",
        marks=[pytest.mark.slow] * (i != j),
    )
    for i, family in enumerate(FAMILIES)
    for j, case in enumerate(SCHEDULES)
]
"""Cases for CI: each family under one schedule, each schedule with one family."""


@pytest.mark.parametrize("case", CASES)
def test_trains(case: Case) -> None:
    results = run_world(2, run_cases, [case])
    check_case(case, [outcomes[0] for outcomes in results])
