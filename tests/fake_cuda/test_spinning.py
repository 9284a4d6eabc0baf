"""A posted receive is a spinning kernel: nothing may wait for all kernels meanwhile.

Every world of these tests checks that; this file tests the first steps, with every kind of channel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.engine.executor import Executor
from megapipe.schedule.load import load
from megapipe.train.step.warm_up import WarmUp
from tests.fake_cuda.world import faults_of, observe, run_world
from tests.parity.cases import END, Case, Rows, configure, validation_rows, validation_samples
from tests.parity.tiers import in_parts

GIVEN = [
    Case(pp=pp, m=4, layers=8, **more)
    for pp in (2, 4)
    for more in (
        {"schedule": "1f1b"},
        {"schedule": "zb_h1", "debug": True},
        {"schedule": "zb_v", "post_validation": True},
        {"schedule": "seq1f1b", "slices": 2},
        {"schedule": "dualpipe", "activations": "full"},
    )
] + [
    Case(pp=2, m=4, layers=4, activations="offload", dtype="fp32"),
    Case(pp=2, m=4, layers=6, chunks=2, schedule="interleaved_1f1b", activations="of each some"),
    Case(pp=2, m=4, layers=4, documents=True, model="llama"),
    Case(pp=2, tp=2, m=4, layers=4, scatter="on"),
    Case(pp=2, tp=2, m=4, layers=4, sequence_parallel=True, dtype="bf16"),
    Case(pp=2, dp=2, m=4, zero=3, layers=4),
    Case(pp=2, dp=2, m=4, zero=2, layers=4, reduce_dtype="bf16", dtype="fp32"),
    Case(pp=2, cp=2, m=4, layers=4, model="llama", activations="full, attention kept"),
    Case(pp=2, cp=2, m=4, layers=4, context="ulysses", schedule="zb_v", documents=True),
    Case(pp=2, cp=2, m=4, layers=4, schedule="seq1f1b", slices=2),
]
CASES = [replace(case, steps=4) for case in GIVEN]


def first_steps(world: Any, cases: list[Case]) -> None:
    from tests.fake_cuda.preload import own

    for case in cases:
        own.forget_kernels()
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid), document_end=END)
        rows = Rows(case)
        for i in range(3):
            step.train(i, rows)
            step.settle()
            step.evaluate(validation_rows(case), validation_samples(case))


@in_parts("world", [2, 4], full=[2])
def test_the_first_steps_wait_for_nothing_that_spins(world: int) -> None:
    run_world(world, first_steps, [case for case in CASES if case.world == world])


def another_schedule(world: Any) -> list[bool]:
    """Take two steps, then two of another schedule. Return, before and after its first step,
    whether it is warm and whether it posts receives ahead."""
    case = Case(pp=2, m=4, layers=8, schedule="1f1b", steps=5)
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=2)), document_end=END)
    rows, found = Rows(case), []
    for i in range(4):
        if i == 2:
            step.settle()
            step.use(load("zb_h1", ranks=2, microbatches=4))
        if i >= 2:
            found += [
                step._warm is step.schedule,
                all(e._stepped for e in step.stepper.executors.plain),
            ]
        step.train(i, rows)
    step.settle()
    return found


@pytest.mark.full
def test_another_schedule_in_the_middle_of_a_run_begins_as_the_first_one() -> None:
    assert run_world(2, another_schedule) == [[False, False, True, True]] * 2


def posted_from_the_start(world: Any, cases: list[Case], warm: bool) -> None:
    """Run cases as if every executor had run a step before."""
    begin = Executor.__init__

    def wrong(self: Executor, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._stepped = True

    Executor.__init__ = wrong  # type: ignore[method-assign]
    if not warm:
        WarmUp.run = lambda self, microbatches: None  # type: ignore[method-assign]
    first_steps(world, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_after_the_warm_up_nothing_in_a_program_is_new(world: int) -> None:
    """So even the first step could post its receives ahead."""
    cases = [case for case in CASES if case.world == world]
    run_world(world, posted_from_the_start, cases, True)


def test_what_is_new_while_a_receive_spins_is_noticed() -> None:
    _, reports = observe(2, posted_from_the_start, CASES[:1], False)
    found = "\n".join(faults_of(reports))
    assert "is launched for the first time while a receive spins" in found


def waits(world: Any) -> None:
    """Check what may be done while a receive is posted, and what may not."""
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
