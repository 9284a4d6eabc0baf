"""What ranks learn of each other in the totals of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from megapipe import TrainStep
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import DataError
from megapipe.testing import World, run_world
from megapipe.train.step import local_stats
from tests.parity.ranks import STEPS, Case, Rows, configure

CASES = [
    Case(dp=2),
    Case(dp=2, post_validation=True),
    Case(pp=2, post_validation=True),
    Case(dp=2, pp=2, in_process=True, weights="double_buffer"),
    Case(pp=2, weights="double_buffer"),
]
"""Cases of each way in which totals are combined: at once, or started and awaited later."""


def memory_told(world: World, cases: list[Case]) -> list[list[float | None]]:
    """Return the memory reported in each step of each case, where rank r says that it holds r + 1
    GiB."""
    told = []
    with mock.patch.object(local_stats, "memory_gib", return_value=world.rank + 1.0):
        for case in cases:
            config, layout = configure(case)
            step, rows = TrainStep(config, layout, world.mesh(case.grid)), Rows(case)
            results = [result for i in range(STEPS) for result in step.train(i, rows)]
            told.append([result.memory_gib for result in results + step.settle()])
    return told


def test_the_memory_of_the_fullest_rank_is_told() -> None:
    """And not the sum of all, as for whatever else is in the totals."""
    for told in run_world(2, memory_told, CASES):
        assert dict(zip(CASES, told, strict=True)) == dict.fromkeys(CASES, [2.0] * STEPS)


def exchanges(world: World, case: Case) -> list[int]:
    """Count how often ranks have summed numbers in each of some steps."""
    config, layout = configure(case)
    step, rows, found = TrainStep(config, layout, world.mesh(case.grid)), Rows(case), []
    for i in range(STEPS):
        with mock.patch.object(
            ParallelMesh, "ordered_sum", autospec=True, side_effect=ParallelMesh.ordered_sum
        ) as counted:
            step.train(i, rows)
        found.append(counted.call_count)
    return found


@pytest.mark.parametrize(
    "case", [Case(dp=2), Case(pp=2, m=3), Case(tp=2, masked=0.4)], ids=lambda case: case.name
)
def test_a_step_has_one_exchange_of_numbers(case: Case) -> None:
    """The tokens of a step come with the totals of the one before; those of the first have none
    to come with."""
    alone = [2] + [1] * (STEPS - 1)
    assert run_world(2, exchanges, case) == [alone] * 2


class Ends(Rows):
    """Samples that one rank cannot read from some number on."""

    def __init__(self, case: Case, first: int) -> None:
        super().__init__(case)
        self.first = first

    def __call__(self, indices: Sequence[int]) -> Any:
        if max(indices) >= self.first:
            raise DataError("the data end here")
        return super().__call__(indices)


def unreadable(world: World) -> tuple[int, str]:
    """Return the steps with a result, and the error of the next."""
    case = Case(dp=2, steps=4)
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(case.grid))
    rows = Ends(case, 2 * config.train.global_batch if world.rank == 1 else 10**9)
    done = 0
    try:
        for i in range(2 + world.rank):
            done += len(step.train(i, rows))
    except DataError as error:
        return done, str(error)
    return done, ""


def test_samples_that_cannot_be_read_are_told_by_their_own_step() -> None:
    """A rank that reads ahead for the totals leaves the step before as it is."""
    assert run_world(2, unreadable) == [(2, ""), (2, "the data end here")]
