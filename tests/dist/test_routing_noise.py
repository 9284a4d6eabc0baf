"""Jitter and second choices at random: parity notices what would make them differ by layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.faults import outcomes_of_faults
from tests.parity.ranks import check_case
from tests.parity.routing_noise_faults import FAULTS, run_faults


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    return outcomes_of_faults(sorted({case.world for case in FAULTS.values()}), run_faults)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match="difference is"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
