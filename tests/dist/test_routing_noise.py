"""Jitter and second choices at random: parity notices what would make them differ by layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.faults import outcomes_of_faults
from tests.parity.ranks import check_case
from tests.parity.routing_noise_faults import FAULTS
from tests.parity.tiers import in_parts, selected


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=3, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match="difference is"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
