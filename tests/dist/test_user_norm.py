"""A user-defined norm in every kind of layout, against the plain reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.pair_runs import check_cases
from tests.parity.ranks import Case

OWN = Case(model="own norm", pp=2)


@pytest.mark.parametrize(
    "case",
    [
        OWN,
        replace(OWN, tp=2, sequence_parallel=True, activations="selective", schedule="zb_h1"),
        pytest.param(replace(OWN, dp=2, zero=3, activations="full"), marks=pytest.mark.full),
        pytest.param(replace(OWN, cp=2, sequence=32, moe="top 2"), marks=pytest.mark.full),
    ],
    ids=lambda case: case.name,
)
def test_trains_as_the_plain_model(case: Case) -> None:
    check_cases([case])
