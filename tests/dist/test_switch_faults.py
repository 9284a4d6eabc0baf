"""The parity check sees mistakes in rules, types, state, dropout and compiled blocks, too."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.testing import run_world
from tests.parity.faults import outcomes_of_faults
from tests.parity.ranks import check_case
from tests.parity.switch_faults import FAULTS, run_faults, run_right
from tests.parity.tiers import in_parts, selected

pytestmark = pytest.mark.full

SIZES = sorted({case.world for case, _ in FAULTS.values()})


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    faults = selected(request, "fault", FAULTS)
    return outcomes_of_faults({fault: case for fault, (case, _) in faults.items()}, run_faults)


@in_parts("fault", FAULTS, full=2, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    case, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=message):
        check_case(case, outcomes[fault.__name__])


@pytest.mark.parametrize("size", SIZES)
def test_the_cases_pass_without_a_fault(size: int) -> None:
    cases = sorted({case for case, _ in FAULTS.values() if case.world == size}, key=str)
    results = run_world(size, run_right, cases)
    for i, case in enumerate(cases):
        check_case(case, [rank[i] for rank in results])
