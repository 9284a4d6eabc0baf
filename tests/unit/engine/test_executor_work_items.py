"""The loop over ops, on fake stages: slices, recomputation, joined ops, replicas, messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from megapipe.engine.channels import InProcessChannels
from megapipe.engine.executor import Executor, Speculation, run_together
from megapipe.engine.recorder import Recorder
from megapipe.schedule.generators import build, forward_only, names
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, loop
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.speculation import arriving, cut, speculation
from tests.parity import registry_cases
from tests.unit.engine.fake_stages import (
    FakeChannels,
    FakeStage,
    fake_executors,
    lines,
    microbatches_of,
    name,
    scalar,
)


def run(schedule: Schedule, *, train: bool = True, steps: int = 1) -> list[list[str]]:
    """Return the ops of every rank, of all steps together."""
    executors, logs = fake_executors(schedule, train=train)
    for _ in range(steps):
        run_together(executors, microbatches_of(schedule))
    return [[line for line in log if "begins" not in line] for log in logs]


def test_slices_are_ops_of_their_own() -> None:
    schedule = build("seq1f1b", ranks=2, microbatches=2, slices=2)
    first, second = (",".join(log) for log in run(schedule))
    assert first == (
        "0F0=1000,0F0.1=1100,0F1=2000,0I0.1=11,0W0.1,0F1.1=2100,0I0=1,0W0,0I1.1=111,0W1.1,"
        "0I1=101,0W1"
    )
    assert second == (
        "1F0=1001,1F0.1=1101,1I0.1=10,1W0.1,1F1=2001,1I0=0,1W0,1F1.1=2101,1I1.1=110,1W1.1,"
        "1I1=100,1W1"
    )


def test_recomputation_takes_no_message() -> None:
    schedule = build("varuna", ranks=2, microbatches=2)
    assert schedule.recompute == {0}
    assert [",".join(log) for log in run(schedule)] == [
        "0F0=1000,0F1=2000,0R0,0I0=1,0W0,0R1,0I1=101,0W1",
        "1F0=1001,1I0=0,1W0,1F1=2001,1I1=100,1W1",
    ]


def test_replicas_of_a_stage_run_their_own_micro_batches() -> None:
    """Both ranks hold both stages; a message is told from another by its micro-batch alone."""
    schedule = build("chimera", ranks=2, microbatches=2)
    assert [",".join(log) for log in run(schedule)] == [
        "0F0=1000,1F1=2001,1I1=100,1W1,0I0=1,0W0",
        "0F1=2000,1F0=1001,1I0=0,1W0,0I1=101,0W1",
    ]


def test_ranks_of_one_process_may_share_the_stages_that_both_hold() -> None:
    schedule = build("chimera", ranks=2, microbatches=2)
    log: list[str] = []
    stages: Any = {s: FakeStage(s, 2, log) for s in (0, 1)}
    executors = [
        Executor(program, stages, channels, shape=scalar, train=True)
        for program, channels in zip(lower(schedule), InProcessChannels.connect(2), strict=True)
    ]
    run_together(executors, microbatches_of(schedule))
    assert log[:4] == ["0 begins to train", "1 begins to train"] * 2
    assert sorted(log[4:]) == sorted(lines(schedule, 0) + lines(schedule, 1))


def joined_pair() -> Schedule:
    """Join two forwards on the first rank, and a forward and a backward on the second."""
    first = [
        pack(Kind.F, 0, 0, joined=True),
        pack(Kind.F, 0, 1),
        *(pack(kind, 0, m) for m in (0, 1) for kind in (Kind.I, Kind.W)),
    ]
    second = [
        pack(Kind.F, 1, 0),
        pack(Kind.B, 1, 0, joined=True),
        pack(Kind.F, 1, 1),
        pack(Kind.B, 1, 1),
    ]
    return Schedule("joined", loop(2), 2, (packed(first), packed(second)))


def executor_with(channels: Any, program: Program, stages: int, log: list[str]) -> Executor:
    held: Any = {
        action.stage: FakeStage(action.stage, stages, log)
        for action in program.actions
        if action.do == ActionKind.COMPUTE
    }
    return Executor(program, held, channels, shape=scalar, train=True)


def test_joined_ops_run_between_their_messages() -> None:
    """What both need is received before them, what both make is sent after them."""
    schedule = joined_pair()
    assert run(schedule) == [lines(schedule, rank) for rank in (0, 1)]
    logs: list[list[str]] = [[], []]
    for program, log in zip(lower(schedule), logs, strict=True):
        executor = executor_with(FakeChannels(log, 1 - program.rank), program, 2, log)
        executor.run(microbatches_of(schedule))
    assert logs[0] == [
        *("0 begins to train", "from 1 expect 1I0 [], 1I1 []"),
        *("0F0=1000", "0F1=2000", "to 1 0F0=1001", "to 1 0F1=2001"),
        *("from 1", "1 has received 2", "0I0=0", "0W0", "from 1", "0I1=0", "0W1"),
        "to 1 finished",
    ]
    assert logs[1] == [
        *("1 begins to train", "from 0 expect 0F0 [], 0F1 []"),
        *("from 0", "1F0=0", "from 0", "1I0=0", "1W0", "1F1=0", "to 0 1I0=1"),
        *("1I1=100", "1W1", "to 0 1I1=101", "to 0 finished"),
    ]


def test_an_acknowledgement_follows_its_message() -> None:
    log: list[str] = []
    actions = (
        Action(ActionKind.RECV, Kind.F, 0, 0, peer=2, acks=3),
        Action(ActionKind.RECV, Kind.F, 0, 1, peer=2),
        Action(ActionKind.COMPUTE, Kind.F, 1, 0),
        Action(ActionKind.COMPUTE, Kind.F, 1, 1),
    )
    microbatches: Any = {(0, 0): 0.0, (1, 0): 1.0}
    executor_with(FakeChannels(log, 2), Program(0, actions), 2, log).run(microbatches)
    assert log[2:5] == ["from 2", "2 has received 3", "from 2"]
    assert not [line for line in log[5:] if "received" in line]


@pytest.mark.parametrize("follows", ["resume", "abort"])
def test_what_a_prefix_leaves_is_run_or_taken_from_the_channels(follows: str) -> None:
    """Rank 0 sends two forwards in its prefix, of which rank 1 runs one in its own."""
    schedule = build("1f1b", ranks=2, microbatches=3)
    counts = speculation(schedule)
    program, log = lower(schedule)[1], list[str]()
    executor = executor_with(FakeChannels(log, 0), program, 2, log)
    executor.set_speculation(Speculation(cut(program, counts[1]), arriving(schedule, 1, counts)))
    executor.run_prefix(microbatches_of(schedule))
    getattr(executor, follows)()
    opened = ["1 begins to train", "from 0 expect 0F0 [], 0F1 []", "from 0", "1F0=0"]
    assert log[:4] == opened
    if follows == "abort":
        assert log[4:] == ["from 0", "to 0 finished"]
        return
    assert log[4] == "from 0 expect 0F2 []"
    ran, wanted = (
        [line.partition("=")[0] for line in each] for each in (log[5:], lines(schedule, 1))
    )
    assert [name for name in ran if name in wanted] == wanted[1:]
    assert log.count("from 0") == 3
    assert log[-1] == "to 0 finished"


def test_each_channel_is_told_what_to_expect_and_of_what_shape() -> None:
    log: list[str] = []
    actions = [
        Action(ActionKind.RECV, Kind.F, 0, m, part, peer=peer)
        for peer, m, part in ((1, 0, 0), (2, 1, 0), (1, 0, 1), (1, 1, 1))
    ]
    channels: Any = FakeChannels(log, 1, 2, 3)

    def shape(message: Op) -> tuple[int, ...]:
        return 5 + message.slice, 2 - message.microbatch, 4

    executor = Executor(Program(0, tuple(actions)), {}, channels, shape=shape, train=True)
    wanted = [
        "from 1 expect 0F0 [5, 2, 4], 0F0.1 [6, 2, 4], 0F1.1 [6, 1, 4]",
        "from 2 expect 0F1 [5, 1, 4]",
    ]
    for _ in range(2):
        log.clear()
        executor.begin({})
        assert log == wanted, "alike in every step"


@pytest.mark.parametrize("schedule_name", names())
def test_every_registered_schedule_runs_its_lists_in_order(schedule_name: str) -> None:
    """Each op with the output of the op that it depends on, over two steps."""
    for case in registry_cases.settings(schedule_name):
        schedule = registry_cases.schedule_of(case)
        wanted = [lines(schedule, rank) for rank in range(case.pp)]
        assert run(schedule, steps=2) == [log * 2 for log in wanted], case.name


MIRRORED = Placement(2, ((0, 1), (1, 0)))


@pytest.mark.parametrize("placement", [MIRRORED, loop(3, 2)])
def test_validation_goes_through_one_replica(placement: Placement) -> None:
    schedule = forward_only(placement, 2)
    logs = run(schedule, train=False)
    assert logs == [
        [line.replace("F", "E") for line in lines(schedule, rank)]
        for rank in range(placement.ranks)
    ]


class CountingRecorder:
    """A recorder that notes, in the log of the stages, when it is told what."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin(self) -> None:
        self.log.append("begin")

    def timed(self, action: Action, call: Callable[[], None]) -> Callable[[], None]:
        assert action.do == ActionKind.COMPUTE
        text = name(action.stage, action.kind.name, (action.microbatch, action.slice))

        def timed_call() -> None:
            self.log.append(f"<{text}")
            call()
            self.log.append(f"{text}>")

        return timed_call


def test_a_recorder_is_told_of_every_op_and_of_no_message() -> None:
    schedule = build("varuna", ranks=2, microbatches=1)
    recorder = CountingRecorder()
    executors, logs = fake_executors(schedule, train=True, recorder=recorder)
    for log in logs:
        recorder.log = log
        log.append("made")
    assert all(log == ["made"] for log in logs), "nothing is recorded before a step"
    first, second = executors
    recorder.log = logs[0]
    first.begin(microbatches_of(schedule))
    for _ in range(2):
        first.advance()
    assert logs[0] == ["made", "0 begins to train", "begin", "<0F0", "0F0=1000", "0F0>"]
    recorder.log = logs[1]
    second.run(microbatches_of(schedule))
    wanted = ["begin", "<1F0", "1F0=1001", "1F0>", "<1B0", "1I0=0", "1W0", "1B0>"]
    assert logs[1] == ["made", "1 begins to train", *wanted]
    recorder.log = logs[0]
    while not first.done:
        first.advance()
    assert logs[0][6:] == ["<0R0", "0R0", "0R0>", "<0B0", "0I0=1", "0W0", "0B0>"]


def test_a_recording_begins_before_receives_are_posted() -> None:
    """On a GPU it waits for the device, and a posted receive is part of what that does."""
    recorder = CountingRecorder()
    executors, _ = fake_executors(build("1f1b", ranks=2, microbatches=2), train=True)
    for executor in executors:
        executor.recorder = cast(Recorder, recorder)
        for end in executor.channels.incoming.values():
            end.expect = lambda messages: recorder.log.append("expect")  # type: ignore[method-assign]
        executor.begin({})
    assert recorder.log == ["begin", "expect"] * 2


def test_the_recorder_of_a_step_has_the_ops_of_a_rank_in_order() -> None:
    schedule = build("dualpipe", ranks=2, microbatches=4)
    recorders = [Recorder(torch.device("cpu")) for _ in range(2)]
    executors = []
    channels = InProcessChannels.connect(2)
    for program in lower(schedule):
        stages: Any = {s: FakeStage(s, 2, []) for s in (0, 1)}
        executors.append(
            Executor(
                program,
                stages,
                channels[program.rank],
                shape=scalar,
                train=True,
                recorder=recorders[program.rank],
            )
        )
    for _ in range(2):
        run_together(executors, microbatches_of(schedule))
    for rank, recorder in enumerate(recorders):
        ops = [Op(*op[:4]) for op in schedule.rank_ops(rank)]
        assert [event.op for event in recorder.events()] == ops, "those of the last step alone"
