"""The data of the next step are read once, while a GPU computes. Errors are raised in their own
step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.errors import DataError
from tests.fake_cuda.world import run_world
from tests.parity.cases import Case, Rows, configure, validation_rows, validation_samples

CASE = Case(pp=2, m=4, layers=4, steps=4, clip=1e-3)
CASES = [CASE, replace(CASE, schedule="zb_h1", post_validation=True)]


class Source:
    """Rows of a case. Notes the samples that are read, and fails once for the sample `broken`."""

    def __init__(self, case: Case, broken: int | None = None) -> None:
        self.rows = Rows(case)
        self.broken = broken
        self.asked: list[int] = []

    def read(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        self.asked += indices
        if self.broken in indices:
            raise DataError(f"sample {self.broken} is damaged")
        return self.rows(indices)


def read(world: Any, case: Case) -> list[list[int]]:
    """Return the samples that were read in each step, with a validation in between."""
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=2)))
    source, found = Source(case), []
    for i in range(case.steps):
        source.asked.clear()
        step.train(i, source.read)
        found.append(sorted(source.asked))
        step.settle()
        step.evaluate(validation_rows(case), validation_samples(case))
    return found


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_step_reads_what_the_next_one_takes(case: Case) -> None:
    size = case.m * case.batch
    steps = [list(range(n * size, (n + 1) * size)) for n in range(case.steps)]
    for found in run_world(2, read, case):
        assert found[1:] == [*steps[2:], []]
        assert set(found[0]) == {*steps[0], *steps[1]}


def fail(world: Any, case: Case) -> tuple[int, str]:
    """Return the step that failed, and its error."""
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=2)))
    source = Source(case, broken=2 * case.m * case.batch + 1)  # of the third step
    for i in range(case.steps):
        try:
            step.train(i, source.read)
        except DataError as error:
            step.settle()
            return i, str(error)
    raise AssertionError("nothing failed")


@pytest.mark.full
def test_an_error_comes_in_its_own_step() -> None:
    assert run_world(2, fail, CASE) == [(2, "sample 17 is damaged")] * 2
