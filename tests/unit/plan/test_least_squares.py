"""Non-negative least squares: the conditions that hold at its minimum."""

from __future__ import annotations

import numpy as np
import pytest

from megapipe.plan.least_squares import nonnegative_least_squares


@pytest.mark.parametrize("seed", range(20))
def test_at_the_minimum_no_unknown_can_improve(seed: int) -> None:
    """The slope by a positive unknown is 0; that by an unknown of 0 is not negative (Karush, Kuhn,
    Tucker)."""
    random = np.random.default_rng(seed)
    rows, targets = random.normal(size=(12, 4)), random.normal(size=12)
    found = nonnegative_least_squares(rows, targets)
    slopes = rows.T @ (rows @ found - targets)
    assert (found >= 0).all()
    assert slopes[found > 0] == pytest.approx(0, abs=1e-9)
    assert (slopes[found == 0] > -1e-9).all()


def test_a_problem_with_a_solution_is_solved() -> None:
    rows = np.random.default_rng(0).random((9, 5))
    unknowns = np.array([0.5, 2.0, 0.0, 1.0, 3.0])
    assert nonnegative_least_squares(rows, rows @ unknowns) == pytest.approx(unknowns)


def test_only_negative_solutions_leave_zeros() -> None:
    assert nonnegative_least_squares(np.eye(3), np.full(3, -1.0)) == pytest.approx(np.zeros(3))
