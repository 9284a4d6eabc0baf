"""Receives are posted as many operations ahead as asked for, from the second step on."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from megapipe.engine.executor import Executor, Speculation
from megapipe.engine.recv_prefetch import posts
from megapipe.schedule.generators import build
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.speculation import arriving, cut, speculation
from tests.unit.engine.fake_stages import FakeChannels, FakeStage, microbatches_of, scalar
from tests.unit.schedule.schedule_cases import schedules


def between(actions: tuple[Action, ...], start: int, stop: int) -> int:
    """Count the operations from one place to another."""
    return sum(action.do == ActionKind.COMPUTE for action in actions[start:stop])


@given(schedules(), st.none() | st.integers(0, 4), st.floats(0, 1))
def test_each_is_as_early_as_asked_for_and_after_the_one_before(
    schedule: Any, ahead: int | None, share: float
) -> None:
    for program in lower(schedule):
        actions = program.actions
        stop = int(share * len(actions))
        waiting: dict[int, list[int]] = {}
        for place, peers in posts(actions, ahead, stop).items():
            for peer in peers:
                waiting.setdefault(peer, []).append(place)
        before: dict[int, int] = {}
        for index, action in enumerate(actions):
            if action.do != ActionKind.RECV:
                continue
            first = before.get(action.peer, 0)
            before[action.peer] = index + 1
            places = waiting.get(action.peer, [])
            if not places or places[0] >= index:
                nothing = between(actions, max(first, stop * (stop <= index)), index) == 0
                assert nothing or ahead == 0
                continue
            place = places.pop(0)
            assert first <= place < index
            assert not place < stop <= index, "what may not come is not waited for"
            early = between(actions, place, index)
            assert ahead is None or early <= ahead
            assert early == ahead or place in (first, stop), "as early as can be"
        assert not any(waiting.values())


def program_of(schedule: Any, rank: int) -> Program:
    return list(lower(schedule))[rank]


def made(program: Program, log: list[str], **options: Any) -> Executor:
    stages: Any = {0: FakeStage(0, 2, log)}
    channels: Any = FakeChannels(log, 1)
    return Executor(program, stages, channels, shape=scalar, train=True, **options)


def received(log: list[str]) -> list[str]:
    """Return the operations and receives of a log."""
    kept = [line for line in log if line.startswith("0") or line in ("from 1", "from 1 posted")]
    return [line.split("=")[0] for line in kept if "W" not in line and "B" not in line]


def test_the_first_step_posts_none_ahead() -> None:
    """Rank 0 of 1F1B on two ranks: F0 F1 B0 F2 B1 B2, which take the gradients 0, 1 and 2."""
    schedule = build("1f1b", ranks=2, microbatches=3)
    log: list[str] = []
    executor = made(program_of(schedule, 0), log, receive_ahead=1)
    executor.run(microbatches_of(schedule))
    first = received(log)
    assert "from 1 posted" not in first
    assert first.count("from 1") == 3
    log.clear()
    executor.run(microbatches_of(schedule))
    second = received(log)
    assert [line for line in second if line != "from 1 posted"] == first
    posted = [i for i, line in enumerate(second) if line == "from 1 posted"]
    assert [second[i + 1] for i in posted] == ["0F1", "0F2", "0I1"]


def test_none_is_posted_ahead_where_that_is_asked_for() -> None:
    schedule = build("1f1b", ranks=2, microbatches=3)
    log: list[str] = []
    executor = made(program_of(schedule, 0), log, receive_ahead=0)
    for _ in range(2):
        executor.run(microbatches_of(schedule))
    assert "from 1 posted" not in log


def test_a_prefix_that_may_be_undone_posts_only_its_own() -> None:
    schedule = build("zb_h1", ranks=2, microbatches=4)
    operations = speculation(schedule)
    program = program_of(schedule, 0)
    log: list[str] = []
    executor = made(program, log, receive_ahead=3)
    prefix = Speculation(cut(program, operations[0]), arriving(schedule, 0, operations))
    executor.set_speculation(prefix)
    executor.run_prefix(microbatches_of(schedule))
    executor.abort()
    executor.run_prefix(microbatches_of(schedule))
    executor.resume()
    assert "from 1 posted" not in log, "a prefix that was undone is no step"
    log.clear()
    executor.run_prefix(microbatches_of(schedule))
    assert not prefix.arriving
    assert "from 1 posted" not in log
    executor.abort()
    executor.run_prefix(microbatches_of(schedule))
    log.clear()
    executor.resume()
    assert "from 1 posted" in log
