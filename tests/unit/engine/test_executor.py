"""The loop over ops: placements other than the loop, orders other than the sender's, leftovers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from megapipe.distributed.mesh import Grid
from megapipe.engine.channels import InProcessChannels
from megapipe.engine.executor import Executor, run_together
from megapipe.schedule.generators import forward_only, gpipe_on
from megapipe.schedule.ir import Kind, Op, Schedule, pack
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import vee
from megapipe.schedule.program import Action, Do, Program
from megapipe.testing import World, run_world
from megapipe.train.step import TrainStep
from tests.parity import reference
from tests.parity.ranks import Case, Outcome, check_case, configure, take_region, train
from tests.unit.engine.fake_stages import FakeStage, fake_executors, microbatches_of, scalar

V_CASE = Case(pp=2, chunks=2, m=3, schedule="gpipe", masked=0.3, debug=True)
"""On the V both ends of the model are on rank 0, so a tied embedding is tied within it."""


def crossed() -> Schedule:
    """A V whose second rank takes the micro-batches in the opposite order of their arrival."""
    forward = {0: ((0, 0), (0, 1), (0, 2), (3, 2), (3, 0), (3, 1))}
    forward[1] = ((1, 2), (1, 1), (1, 0), (2, 2), (2, 0), (2, 1))
    backward = {0: ((3, 1), (3, 0), (3, 2), (0, 0), (0, 2), (0, 1))}
    backward[1] = ((2, 2), (2, 1), (2, 0), (1, 2), (1, 0), (1, 1))
    ops = []
    for rank in (0, 1):
        codes = [pack(Kind.F, s, m) for s, m in forward[rank]]
        codes += [pack(kind, s, m) for kind in (Kind.I, Kind.W) for s, m in backward[rank]]
        ops.append(array("q", codes))
    return Schedule(name="crossed", placement=vee(2), microbatches=3, ops=tuple(ops))


def run_v(world: World, cases: Sequence[Case], schedules: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for case, name in zip(cases, schedules, strict=True):
        config, layout = configure(case)
        schedule = crossed() if name == "crossed" else gpipe_on(vee(2), case.m)
        grid = Grid(pp=1 if case.in_process else case.pp, dp=case.dp, tp=case.tp)
        step = TrainStep(config, layout, world.mesh(grid), schedule=schedule)
        params = reference.init_random(config.model, seed=3)
        step.optimizer.set_weights(
            lambda spec, out, params=params: take_region(params[spec.name], spec, out)
        )
        outcomes.append(train(step, case, validate=True))
    return outcomes


@pytest.mark.parametrize(
    ("cases", "schedules"),
    [
        (
            [V_CASE, replace(V_CASE, tied=False, debug=False), V_CASE],
            ["gpipe", "gpipe", "crossed"],
        ),
        (
            [replace(V_CASE, dp=2), replace(V_CASE, tp=2, sequence_parallel=True, zero=0)],
            ["gpipe", "crossed"],
        ),
        (
            [replace(V_CASE, in_process=True), replace(V_CASE, in_process=True, tied=False)],
            ["crossed", "gpipe"],
        ),
    ],
    ids=["two ranks", "four ranks", "in process"],
)
def test_a_v_gives_the_reference_s_numbers(cases: list[Case], schedules: list[str]) -> None:
    """Loss, gradients, norm, weights, and forward_only in the validation."""
    results = run_world(cases[0].world, run_v, cases, schedules)
    for i, case in enumerate(cases):
        check_case(case, [outcomes[i] for outcomes in results])


def test_the_crossed_schedule_consumes_out_of_order() -> None:
    """Its second rank receives three micro-batches before it uses the first of them."""
    actions = lower(crossed())[1].actions
    start = [(action.do, action.microbatch) for action in actions[:4]]
    assert start == [(Do.RECV, 0), (Do.RECV, 1), (Do.RECV, 2), (Do.COMPUTE, 2)]


def test_every_op_gets_the_output_of_the_op_that_it_depends_on() -> None:
    schedule = gpipe_on(vee(2), 2)
    executors, logs = fake_executors(schedule, train=True)
    run_together(executors, microbatches_of(schedule))
    assert ",".join(logs[0]) == (
        "0 begins to train,3 begins to train,0F0=1000,0F1=2000,3F0=1003,3F1=2003,"
        "3I0=0,3W0,3I1=100,3W1,0I0=3,0W0,0I1=103,0W1"
    )
    assert ",".join(logs[1]) == (
        "1 begins to train,2 begins to train,1F0=1001,1F1=2001,2F0=1002,2F1=2002,"
        "2I0=1,2W0,2I1=101,2W1,1I0=2,1W0,1I1=102,1W1"
    )


def test_without_training_the_forwards_are_evaluations() -> None:
    schedule = forward_only(vee(2), 3)
    executors, logs = fake_executors(schedule, train=False)
    for _ in range(2):
        run_together(executors, microbatches_of(schedule))
    step = ["0 begins to evaluate", "3 begins to evaluate", "0E0=1000"]
    assert logs[0][:3] == step
    assert logs[0].count(step[0]) == 2
    last = ["3E0=1003", "3E1=2003", "3E2=3003"]
    assert [line for line in logs[0] if line.startswith("3E")] == last * 2
    assert all(executor.done for executor in executors)


def test_what_nobody_consumes_is_noticed() -> None:
    program = Program(0, (Action(Do.COMPUTE, Kind.F, 0, 0),))
    (channels,) = InProcessChannels.connect(1)
    stages: Any = {0: FakeStage(0, 2, [])}
    microbatches: Any = {(0, 0): 1.0}
    executor = Executor(program, stages, channels, shape=scalar, train=True)
    with pytest.raises(AssertionError, match=r"never consumed: .*stage=0, microbatch=0"):
        executor.run(microbatches)
    with pytest.raises(AssertionError, match=r"never consumed: .*stage=0, microbatch=0"):
        run_together([executor], microbatches)


def test_programs_that_wait_for_each_other_are_noticed() -> None:
    executors = [
        Executor(
            Program(i, (Action(Do.RECV, Kind.F, i, 0, peer=1 - i),)),
            {},
            channels,
            shape=scalar,
            train=True,
        )
        for i, channels in enumerate(InProcessChannels.connect(2))
    ]
    with pytest.raises(AssertionError, match="wait for each other"):
        run_together(executors, {})


def test_ready_follows_the_channel() -> None:
    sender, receiver = InProcessChannels.connect(2)
    program = Program(1, (Action(Do.RECV, Kind.F, 0, 0, peer=0),))
    executor = Executor(program, {}, receiver, shape=scalar, train=True)
    executor.begin({})
    assert not executor.ready()
    sender.outgoing[1].send(Op(Kind.F, 0, 0), torch.zeros(1))
    assert executor.ready()
    executor.advance()
    assert executor.done


def test_a_new_step_starts_from_the_beginning() -> None:
    log: list[str] = []
    program = Program(0, (Action(Do.COMPUTE, Kind.F, 0, 0), Action(Do.COMPUTE, Kind.B, 0, 0)))
    (channels,) = InProcessChannels.connect(1)
    stages: Any = {0: FakeStage(0, 1, log)}
    executor = Executor(program, stages, channels, shape=scalar, train=True)
    microbatches: Any = {(0, 0): 4.0}
    executor.begin(microbatches)
    executor.advance()
    executor.run(microbatches)
    begin = "0 begins to train"
    assert log == [begin, "0F0=4", begin, "0F0=4", "0I0=0", "0W0"]
