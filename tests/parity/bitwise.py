"""Outcomes of cases that have to be bitwise equal, or all equal to the reference's outcome."""

from __future__ import annotations

import numpy as np

from megapipe.testing import run_world
from tests.parity.ranks import Case, Outcome, check_case, run_cases


def outcomes_of(cases: list[Case]) -> list[list[Outcome]]:
    """Return, for each case, the outcomes of all ranks."""
    results = run_world(cases[0].world, run_cases, cases)
    return [[outcomes[i] for outcomes in results] for i in range(len(cases))]


def check_groups(groups: list[list[Case]]) -> None:
    """Check groups of cases of one world: in each group the first case computes what the reference
    does, and the others the same bits."""
    cases = [case for group in groups for case in group]
    results = run_world(cases[0].world, run_cases, cases, timeout_s=60 + 10 * len(cases))
    found = dict(zip(cases, map(list, zip(*results, strict=True)), strict=True))
    for first, *others in groups:
        for case in (first, *others):
            try:
                if case is first:
                    check_case(case, found[case])
                else:
                    assert_bitwise(found[case], found[first])
            except AssertionError as error:
                raise AssertionError(f"{case.name}: {error}") from None


def assert_bitwise(actual: list[Outcome], expected: list[Outcome]) -> None:
    """Assert equal losses, norms, owned gradients and weights (every replica) on every rank."""
    for a, b in zip(actual, expected, strict=True):
        assert a.losses == b.losses
        assert a.norms == b.norms
        assert a.validation == b.validation
        for mine, theirs in zip((*a.grads, *a.copies), (*b.grads, *b.copies), strict=True):
            assert [(name, region) for name, region, _ in mine] == [
                (n, region) for n, region, _ in theirs
            ], "a rank has other parts: is the partition the same?"
            for (name, _, x), (_, _, y) in zip(mine, theirs, strict=True):
                assert np.array_equal(x, y), name
