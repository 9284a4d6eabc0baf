"""The loop over ops: placements other than the loop, orders other than the sender's, leftovers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megapipe.engine.channels import InProcessChannels
from megapipe.engine.executor import Executor, run_together
from megapipe.schedule.generators import forward_only, gpipe_on
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import vee
from megapipe.schedule.program import Action, ActionKind, Program
from tests.parity.crossed import crossed
from tests.unit.engine.fake_stages import FakeStage, fake_executors, microbatches_of, scalar


def test_the_crossed_schedule_consumes_out_of_order() -> None:
    """The second rank receives three micro-batches before it uses the first of them."""
    actions = lower(crossed())[1].actions
    start = [(action.do, action.microbatch) for action in actions[:4]]
    assert start == [
        (ActionKind.RECV, 0),
        (ActionKind.RECV, 1),
        (ActionKind.RECV, 2),
        (ActionKind.COMPUTE, 2),
    ]


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
    program = Program(0, (Action(ActionKind.COMPUTE, Kind.F, 0, 0),))
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
            Program(i, (Action(ActionKind.RECV, Kind.F, i, 0, peer=1 - i),)),
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
    program = Program(1, (Action(ActionKind.RECV, Kind.F, 0, 0, peer=0),))
    executor = Executor(program, {}, receiver, shape=scalar, train=True)
    executor.begin({})
    assert not executor.ready()
    sender.outgoing[1].send(Op(Kind.F, 0, 0), torch.zeros(1))
    assert executor.ready()
    executor.advance()
    assert executor.done


def test_a_new_step_starts_from_the_beginning() -> None:
    log: list[str] = []
    program = Program(
        0, (Action(ActionKind.COMPUTE, Kind.F, 0, 0), Action(ActionKind.COMPUTE, Kind.B, 0, 0))
    )
    (channels,) = InProcessChannels.connect(1)
    stages: Any = {0: FakeStage(0, 1, log)}
    executor = Executor(program, stages, channels, shape=scalar, train=True)
    microbatches: Any = {(0, 0): 4.0}
    executor.begin(microbatches)
    executor.advance()
    executor.run(microbatches)
    begin = "0 begins to train"
    assert log == [begin, "0F0=4", begin, "0F0=4", "0I0=0", "0W0"]
