"""How many functions of the package a step calls: what Python costs, without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from megapipe import TrainStep
from megapipe.testing import World, run_world
from megapipe.version import PACKAGE
from tests.parity.ranks import Case, Rows, configure

MOST = {
    Case(steps=4, dtype="fp32"): 1746,
    Case(steps=4, dtype="fp32", dp=2): 1852,
    Case(steps=4, dtype="fp32", pp=2, m=8): 4287,
    Case(steps=4, dtype="fp32", pp=2, m=8, schedule="zb_h1"): 4170,
}
"""Calls of a step, on the rank with most of them: 4 blocks, and 2 or 8 micro-batches. A number may
be lowered; a feature that raises one is looked at, whether what it asks could be asked once."""


def calls(function: Callable[[], object]) -> int:
    """Count calls of functions of the package while `function` runs in this thread."""
    folder, found = str(PACKAGE), 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def of_a_step(world: World, case: Case) -> int:
    """Count calls of the third step: the first ones prepare what later ones find."""
    config, layout = configure(case)
    step, rows = TrainStep(config, layout, world.mesh(case.grid)), Rows(case)
    for i in range(2):
        step.train(i, rows)

    def third() -> Any:
        return step.train(2, rows)

    return calls(third)


@pytest.mark.parametrize("case", MOST, ids=lambda case: case.name)
def test_a_step_calls_no_more_than_it_did(case: Case) -> None:
    found = [max(run_world(case.world, of_a_step, case)) for _ in range(2)]
    assert found[0] == found[1], "a count is of a step, and not of a clock"
    assert found[0] <= MOST[case]
