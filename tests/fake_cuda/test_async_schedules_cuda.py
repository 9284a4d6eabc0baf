"""No-flush training with a device per rank: the reference's results, with correct stream order."""

from __future__ import annotations

import pytest

from tests.fake_cuda.world import run_world
from tests.parity.async_ranks import check_stale, run_stale_cases
from tests.parity.cases import Case

ALONE = Case(pp=2, m=2, layers=2, uneven=True, tied=False, steps=6, batch=1)
CASES = {
    2: [
        Case(**{**vars(ALONE), "weights": "double_buffer", "tied": True, "look_ahead": 1}),
    ],
    4: [Case(**{**vars(ALONE), "weights": "double_buffer", "tied": True, "dp": 2})],
}


@pytest.mark.parametrize("world", CASES)
def test_parity(world: int) -> None:
    results = run_world(world, run_stale_cases, CASES[world], "cuda", timeout_s=200)
    for number, case in enumerate(CASES[world]):
        check_stale(case, [outcomes[number] for outcomes in results])
