"""Least squares with non-negative unknowns (Lawson and Hanson, Solving Least Squares Problems)."""

from itertools import combinations

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def nonnegative_least_squares(rows: Matrix, targets: Matrix) -> Matrix:
    """Return the x >= 0 that minimizes |rows @ x - targets|. rows: [n, k], targets: [n].

    For a few unknowns every set of positive ones is tried: at the minimum, those unknowns solve the
    least-squares problem without the others.
    """
    count = rows.shape[1]
    best, least = np.zeros(count), float(targets @ targets)
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(rows[:, columns], targets, rcond=None)
            if found.min() < 0:
                continue
            rest = rows[:, columns] @ found - targets
            if (error := float(rest @ rest)) < least:
                best, least = np.zeros(count), error
                best[columns] = found
    return best
