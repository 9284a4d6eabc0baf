"""Holders of a stage meet to reduce it: early, and so that nobody waits for ever."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.data_parallel import ReplicaPolicy, with_zero_actions
from megapipe.schedule.generators import build, forward_only
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, loop, mirrored
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.shared_reductions import SharedReduction, shared_reductions
from tests.unit.schedule.schedule_cases import of, schedules


def run(schedule: Schedule, programs: list[Program]) -> None:
    """Run all programs to their ends. A rank waits in each reduction until all holders of the stage
    are there, as well as for its messages: more than any run does."""
    left = [list(reversed(program.actions)) for program in programs]
    channels: Counter[tuple[int, int]] = Counter()
    going = True
    while going:
        going = False
        for rank, actions in enumerate(left):
            while actions and may_run(actions[-1], rank, left, channels, schedule):
                action = actions[-1]
                going = True
                if action.do == ActionKind.REDUCE:
                    for holder in schedule.placement.holders(action.stage):
                        left[holder].pop()
                    continue
                actions.pop()
                if action.do == ActionKind.SEND:
                    channels[rank, action.peer] += 1
                elif action.do == ActionKind.RECV:
                    channels[action.peer, rank] -= 1
    waiting = {rank: actions[-1] for rank, actions in enumerate(left) if actions}
    assert not waiting, f"these wait for ever: {waiting}"


def may_run(
    action: Action,
    rank: int,
    left: list[list[Action]],
    channels: Counter[tuple[int, int]],
    schedule: Schedule,
) -> bool:
    if action.do == ActionKind.RECV:
        return channels[action.peer, rank] > 0
    if action.do == ActionKind.REDUCE:
        holders = schedule.placement.holders(action.stage)
        return all(left[holder] and left[holder][-1] == action for holder in holders)
    return True


@settings(max_examples=150)
@given(schedules(), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_nobody_waits_for_ever(
    schedule: Schedule, zero: int, prefetch: int, chunked_loss: bool
) -> None:
    plain = lower(schedule)
    policy = ReplicaPolicy(zero, prefetch, chunked_loss)
    programs = list(with_zero_actions(plain, schedule, policy))
    run(schedule, programs)
    for program in programs:
        reduced = Counter(
            action.stage for action in program.actions if action.do == ActionKind.REDUCE
        )
        for stage in schedule.placement.stages_of(program.rank):
            if len(schedule.placement.holders(stage)) > 1:
                assert reduced[stage] == (not schedule.forward_only), "once"
        check_complete(schedule, program)


def check_complete(schedule: Schedule, program: Program) -> None:
    """Assert that gradients are complete when the holders of a stage reduce them."""
    over: set[int] = set()
    for action in program.actions:
        if action.do == ActionKind.REDUCE and len(schedule.placement.holders(action.stage)) > 1:
            over.add(action.stage)
        if action.do == ActionKind.COMPUTE and action.kind != Kind.F:
            assert action.stage not in over


CROSSED = of("0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1", 2, mirrored(loop(2)), direction=(0, 1))


def test_places() -> None:
    assert shared_reductions(CROSSED) == [[SharedReduction(3, 1), SharedReduction(4, 0)]] * 2
    assert shared_reductions(forward_only(mirrored(loop(2)), 2)) == [[], []]
    assert shared_reductions(build("1f1b", ranks=2, microbatches=2)) == [[], []]


def test_a_holder_is_there_when_the_last_one_is_through() -> None:
    """Rank 0 is through with stage 0 long before rank 1, which goes on with it until its end."""
    chain = Placement(3, ((0, 2), (1, 2)))
    lists = "0F0 0B0/0F1 0F2 0B1 0B2/1F0 1B0 1F1 1B1 1F2 1B2"
    schedule = of(lists, 3, chain, direction=(0, 1, 1))
    assert shared_reductions(schedule) == [[SharedReduction(2, 0)], [SharedReduction(4, 0)], []]


def test_one_that_adds_nothing_comes_at_its_end() -> None:
    one = build("chimera", ranks=2, microbatches=1)
    assert shared_reductions(one) == [[SharedReduction(2, 0), SharedReduction(2, 1)]] * 2


def test_meeting_in_different_orders_is_noticed() -> None:
    programs = list(with_zero_actions(lower(CROSSED), CROSSED, ReplicaPolicy()))
    run(CROSSED, programs)
    first, second = programs
    reductions = [action for action in second.actions if action.do == ActionKind.REDUCE]
    others = [action for action in second.actions if action.do != ActionKind.REDUCE]
    swapped = Program(1, (*others, *reversed(reductions)))
    with pytest.raises(AssertionError, match="these wait for ever"):
        run(CROSSED, [first, swapped])
