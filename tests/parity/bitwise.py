"""Outcomes of cases that have to be equal to the bit."""

from __future__ import annotations

import numpy as np

from megapipe.testing import run_world
from tests.parity.ranks import (
    Case,
    Outcome,
    run_cases,
)


def outcomes_of(cases: list[Case]) -> list[list[Outcome]]:
    """Per case, the outcomes of all ranks."""
    results = run_world(cases[0].world, run_cases, cases)
    return [[outcomes[i] for outcomes in results] for i in range(len(cases))]


def assert_bitwise(actual: list[Outcome], expected: list[Outcome]) -> None:
    """Losses, norms, every owned gradient and every copy of every weight, on every rank."""
    for a, b in zip(actual, expected, strict=True):
        assert a.losses == b.losses
        assert a.norms == b.norms
        assert a.validation == b.validation
        for mine, theirs in zip((*a.grads, *a.copies), (*b.grads, *b.copies), strict=True):
            assert [(name, region) for name, region, _ in mine] == [
                (n, region) for n, region, _ in theirs
            ]
            for (name, _, x), (_, _, y) in zip(mine, theirs, strict=True):
                assert np.array_equal(x, y), name
