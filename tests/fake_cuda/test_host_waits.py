"""How often the host waits for the device in a training step: never inside of a program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megapipe.distributed.mesh import Grid
from megapipe.train.step import TrainStep
from tests.fake_cuda.world import run_world
from tests.parity.ranks import Case, Rows, configure

BASE = Case(dtype="bf16", m=4, masked=0.3, layers=4)
PIPELINE = replace(BASE, pp=2)
CASES = {
    "one process": (BASE, 6),
    "zb_h1": (replace(PIPELINE, schedule="zb_h1"), 6),
    "post-validation": (replace(PIPELINE, schedule="zb_h1", post_validation=True), 10),
    "ZeRO-3": (replace(BASE, dp=2, zero=3, chunks=2, schedule="interleaved_1f1b", tied=False), 6),
    "offload": (replace(PIPELINE, activations="offload", offload="host"), 6),
    "tensor parallel": (replace(BASE, tp=2, sequence_parallel=True), 6),
}
"""Layouts, and how many waits a step has at most; what is less is an improvement."""


def waits(world: Any, case: Case) -> tuple[Counter[str], Counter[str]]:
    """Those of a step that is not the first, inside of its program and in all."""
    from tests.fake_cuda.preload import own

    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
    rows = Rows(case)
    for i in range(2):
        step.train(i, rows)
    outside: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    executor = type(step._executors[0])
    run_to = executor._run_to

    def watched(self: Any, stop: int) -> None:
        outside.update(own.report()["host_waits"])
        run_to(self, stop)
        inside.update(own.report()["host_waits"])

    executor._run_to = watched  # type: ignore[method-assign]
    own.report()
    step.train(2, rows)
    outside.update(own.report()["host_waits"])
    step.settle()
    return inside, outside + inside


@pytest.mark.parametrize(
    "name",
    [name if name == "zb_h1" else pytest.param(name, marks=pytest.mark.full) for name in CASES],
)
def test_waits_of_the_host(name: str) -> None:
    case, most = CASES[name]
    for inside, total in run_world(case.world, waits, case):
        assert not inside
        assert sum(total.values()) <= most, total
