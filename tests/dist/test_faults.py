"""The parity check has teeth: each seeded fault makes it fail."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.testing import run_world
from tests.parity.bitwise import assert_bitwise
from tests.parity.faults import FAULTS, OUTRIGHT, outcomes_of_faults, run_with_dropout
from tests.parity.ranks import Case, check_case, run_cases
from tests.parity.tiers import in_parts, one_of, selected


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, default=12, full=4, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    ranks = outcomes[fault.__name__]
    texts = {outcome for outcome in ranks if isinstance(outcome, str)}
    if fault.__name__ in OUTRIGHT:
        assert texts == {OUTRIGHT[fault.__name__]}
        return
    assert not texts
    with pytest.raises(AssertionError, match=r"difference is|own it|padding|has changed"):
        check_case(FAULTS[fault], ranks)


@one_of(4)
def test_the_cases_pass_without_a_fault(some: slice) -> None:
    of_faults = {*[*dict.fromkeys(FAULTS.values())][some]}
    for size in sorted({case.world for case in of_faults}):
        cases: list[Case] = [case for case in of_faults if case.world == size]
        results = run_world(size, run_cases, cases)
        for i, case in enumerate(cases):
            check_case(case, [rank[i] for rank in results])


def test_random_numbers_of_a_recomputation_are_noticed() -> None:
    """Bitwise: a run without recomputation stands in for the reference."""
    ((plain, recomputing, wrong),) = run_world(1, run_with_dropout)
    assert_bitwise(recomputing, plain)
    assert wrong[0].losses[0] == plain[0].losses[0], "the forward is right"
    with pytest.raises(AssertionError):
        assert_bitwise(wrong, plain)
