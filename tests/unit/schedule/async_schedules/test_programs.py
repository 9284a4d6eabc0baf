"""Programs of a stream: cut at its windows, alike in the steady state, complete."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest

from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.async_schedules.programs import ProgramSegment, Runs, run
from megapipe.schedule.ir import Kind
from megapipe.schedule.program import Action, ActionKind

STREAMS = [
    ("1f1b", "stash", 4, 1, 0),
    ("1f1b", "latest", 3, 2, 2),
    ("1f1b", "double_buffer", 3, 4, 0),
    ("eager_1f1b", "vertical", 3, 1, 0),
    ("eager_1f1b", "double_buffer", 3, 5, 1),
    ("two_group", "double_group", 3, 3, 0),
    ("1f1b_rr", "stash", 3, 2, 0),
    ("1f1b_rr", "double_buffer", 4, 4, 0),
]


@pytest.fixture(params=STREAMS, ids=lambda each: f"{each[1]}, p {each[2]} m {each[3]}")
def stream(request: pytest.FixtureRequest) -> AsyncSchedule:
    order, weights, ranks, microbatches, advance = request.param
    return load_async_schedule(
        order, weights, ranks=ranks, microbatches=microbatches, extra_warmup=advance
    )


def actions(part: ProgramSegment, window: int, size: int) -> list[Action]:
    """Return the actions of a part, as they are in a whole run."""
    return [
        action._replace(
            microbatch=window - action.microbatch
            if action.kind == Kind.U
            else window * size + action.microbatch
        )
        for action in part.program.actions
    ]


@pytest.mark.parametrize("windows", [1, 2, 3, 30])
def test_the_parts_of_a_run_are_those_of_all_its_windows(
    stream: AsyncSchedule, windows: int
) -> None:
    runs, whole = Runs(stream), run(stream, windows)
    assert runs.of(windows).fill == whole.fill
    for number in range(windows):
        assert runs.part(number, windows) == whole.segments[number], number


def test_what_is_under_way_at_a_cut_is_sent_before_and_received_behind_it(
    stream: AsyncSchedule,
) -> None:
    size, windows = stream.microbatches, 6
    made = run(stream, windows)
    sent: set[tuple[int, object]] = set()
    received: set[tuple[int, object]] = set()
    for number, by_rank in enumerate((made.fill, *made.segments)):
        window = max(0, number - 1)
        for rank, part in enumerate(by_rank):
            for action in actions(part, window, size):
                message = action.kind, action.stage, action.microbatch
                if action.do == ActionKind.SEND:
                    sent.add((action.peer, message))
                elif action.do == ActionKind.RECV:
                    received.add((rank, message))
        told = {
            (rank, (each.message.kind, each.message.stage, number * size + each.message[2]))
            for rank, part in enumerate(by_rank)
            for each in part.in_flight
        }
        assert received <= sent
        assert told == sent - received
    assert sent == received


def test_a_segment_of_pipedream_updates_at_its_end_and_reads_what_it_has_read() -> None:
    stream = load_async_schedule("1f1b", "stash", ranks=2, microbatches=2)
    first, last = Runs(stream).part(5, 20)
    told = [
        (action.do.name, action.kind.name, action.microbatch, read.version)
        for action, read in zip(first.program.actions, first.reads, strict=True)
    ]
    assert told == [
        ("COMPUTE", "F", 1, 0),
        ("SEND", "F", 1, 0),
        ("RECV", "I", 0, -1),
        ("COMPUTE", "B", 0, -1),
        ("COMPUTE", "F", 2, 0),
        ("SEND", "F", 2, 0),
        ("RECV", "I", 1, 0),
        ("COMPUTE", "B", 1, 0),
        ("COMPUTE", "U", 0, 1),
    ]
    assert [message.message.microbatch for message in last.in_flight] == [0]
    assert [message.read.version for message in last.in_flight] == [0]


def test_where_stages_agree_both_ends_of_a_message_name_one_version() -> None:
    for name, schedule in product(("vertical", "double_buffer", "stash"), ("1f1b", "eager_1f1b")):
        stream = load_async_schedule(schedule, name, ranks=3, microbatches=4)
        ends: defaultdict[tuple[int, int, int], set[int]] = defaultdict(set)
        run = Runs(stream).of(5)
        for window, by_rank in [(0, run.fill), *enumerate(run.segments)]:
            for part in by_rank:
                for action, read in zip(part.program.actions, part.reads, strict=True):
                    if action.do != ActionKind.COMPUTE:
                        k = window * 4 + action.microbatch
                        ends[action.kind, action.stage, k].add(max(0, window + read.version))
                for _, message, read in part.in_flight:
                    after = window + part.windows
                    k = after * 4 + message.microbatch
                    known = ends[message.kind, message.stage, k]
                    assert not stream.policy.agrees or known == {max(0, after + read.version)}
        assert all(len(versions) == 1 for versions in ends.values()) == stream.policy.agrees
