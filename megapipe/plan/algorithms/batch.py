"""Ways to divide a batch into micro-batches."""

from __future__ import annotations

from megapipe.plan.algorithms.problem import Problem

DOUBLINGS = 3
"""Number of times that a micro-batch is halved if it is no whole number of samples."""


def microbatch_counts(problem: Problem) -> list[int]:
    """Return the numbers of micro-batches that divide the batch into whole samples, ascending. If
    the problem's micro-batches are no whole samples, they are halved some times."""
    total = problem.samples * problem.microbatches
    if total != int(total):
        return [problem.microbatches << power for power in range(DOUBLINGS + 1)]
    return [count for count in range(1, int(total) + 1) if total % count == 0]
