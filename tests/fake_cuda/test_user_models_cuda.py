"""User modules with a device per rank: their messages are packed tuples of tensors."""

from __future__ import annotations

import pytest

from tests.fake_cuda.world import run_world
from tests.parity.cases import Case
from tests.parity.user_models import Own, check_own, run_own


@pytest.mark.full
@pytest.mark.parametrize(
    "own",
    [
        Own("tuples", Case(pp=2, schedule="zb_h1", m=4), 6),
        pytest.param(Own("tied", Case(pp=2, m=3, zero=1), 6), marks=pytest.mark.slow),
    ],
    ids=["packed", "tied"],
)
def test_they_compute_what_the_reference_does(own: Own) -> None:
    results = run_world(2, run_own, [own])
    check_own(own, [outcomes[0] for outcomes in results])
