"""What ranks learn of each other in the totals of a step."""

from __future__ import annotations

from unittest import mock

from megapipe.testing import World, run_world
from megapipe.train import own_totals
from megapipe.train.step import TrainStep
from tests.parity.ranks import STEPS, Case, Rows, configure

CASES = [
    Case(dp=2),
    Case(dp=2, post_validation=True),
    Case(pp=2, post_validation=True),
    Case(dp=2, pp=2, in_process=True, weights="double_buffer"),
    Case(pp=2, weights="double_buffer"),
]
"""Each way in which totals are combined: at once, and begun to be taken later."""


def memory_told(world: World, cases: list[Case]) -> list[list[float | None]]:
    """Of each step of each case, where rank r says that it holds r + 1 GiB."""
    told = []
    with mock.patch.object(own_totals, "memory_gib", return_value=world.rank + 1.0):
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
