"""A posted receive is a kernel that spins: nothing that waits for all kernels may come meanwhile.

Every world of these tests checks it; here are the first two steps, in every kind of channel.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe.distributed.mesh import Grid
from megapipe.engine.executor import Executor
from megapipe.train.step import TrainStep
from tests.fake_cuda.world import faults_of, observe, run_world
from tests.parity.cases import Case, Rows, configure

CASES = [
    Case(pp=pp, m=4, layers=8, **more)
    for pp in (2, 4)
    for more in (
        {"schedule": "1f1b"},
        {"schedule": "zb_h1", "debug": True},
        {"schedule": "zb_v", "post_validation": True},
        {"schedule": "seq1f1b", "slices": 2},
        {"schedule": "dualpipe", "activations": "full"},
    )
] + [Case(pp=2, tp=2, m=4, layers=4, scatter="on"), Case(pp=2, dp=2, m=4, zero=3, layers=4)]


def first_steps(world: Any, cases: list[Case]) -> None:
    for case in cases:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
        rows = Rows(case)
        for i in range(3):
            step.train(i, rows)
        step.settle()


@pytest.mark.parametrize("world", [2, 4])
def test_the_first_steps_wait_for_nothing_that_spins(world: int) -> None:
    run_world(world, first_steps, [case for case in CASES if case.world == world])


def posted_from_the_start(world: Any, case: Case) -> None:
    """As if every executor had run a step before."""
    begin = Executor.__init__

    def wrong(self: Executor, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._stepped = True

    Executor.__init__ = wrong  # type: ignore[method-assign]
    first_steps(world, [case])


def test_receives_in_the_first_step_are_noticed() -> None:
    _, reports = observe(2, posted_from_the_start, CASES[0])
    found = "\n".join(faults_of(reports))
    assert "is launched for the first time while a receive spins" in found


def waits(world: Any) -> None:
    """What may not be done while a receive is posted, and what may."""
    group: Any = world.mesh(Grid(pp=2)).group_of([0, 1]).group
    x = torch.ones(3, device="cuda")
    y = x + x
    if world.rank == 0:
        group.send([x], 1, 0).wait()
        dist.all_reduce(y)
        return
    work = group.recv([x], 0, 0)
    y = y + y
    y.sum()
    y[0].cpu()
    dist.all_reduce(y)
    torch.cuda.synchronize()
    work.wait()
    x.sum()


def test_what_waits_is_noticed() -> None:
    _, reports = observe(2, waits)
    found = [fault for fault in faults_of(reports) if "spins" in fault]
    assert [fault.partition(": ")[2].partition(" while")[0] for fault in found] == [
        "aten::sum [3] Float [] Float is launched for the first time",
        "the host waits for its device (synchronize a device)",
        "the first all_reduce of ranks 0,1 is made",
    ], found
