"""Lowering: explicit messages on one-way channels."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import all_small, schedules
from test_schedule_validate import accepted, alter
from token_game import run_programs

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.lower import Action, Channel, Do, channel_rounds, channels, lower
from megapipe.schedule.placement import Placement, loop, vee

F, B, I = Kind.F, Kind.B, Kind.I  # noqa: E741


def check(schedule, seed):
    programs = lower(schedule)
    assert [program.rank for program in programs] == list(range(schedule.placement.ranks))
    for program in programs:
        actions = program.actions
        computed = [action for action in actions if action.do == Do.COMPUTE]
        assert [action[1:5] for action in computed] == schedule.rank_ops(program.rank)
        assert all(action.peer == -1 and action.acks == 0 for action in computed)
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            if action.do == Do.RECV:  # as late as can be: receives run up to their consumer
                assert following.do in (Do.RECV, Do.COMPUTE)
                if following.do == Do.COMPUTE:
                    step = 1 if following.kind == F else -1
                    assert following.stage == action.stage + step
                    assert following.microbatch == action.microbatch
            if following is not None and following.do == Do.SEND:
                assert action.do == Do.COMPUTE
                assert following.kind == (F if action.kind == F else I)
                assert following[2:5] == action[2:5]
    run_programs(schedule, programs, channels(schedule), seed)


def test_program_of_two_ranks():
    first, second = lower(build("1f1b", ranks=2, microbatches=2))
    compute, send, recv = Do.COMPUTE, Do.SEND, Do.RECV
    assert first.actions == (
        Action(compute, F, 0, 0),
        Action(send, F, 0, 0, peer=1),
        Action(compute, F, 0, 1),
        Action(send, F, 0, 1, peer=1),
        Action(recv, I, 1, 0, peer=1, acks=1),
        Action(compute, B, 0, 0),
        Action(recv, I, 1, 1, peer=1, acks=1),
        Action(compute, B, 0, 1),
    )
    assert second.actions == (
        Action(recv, F, 0, 0, peer=0),
        Action(compute, F, 1, 0),
        Action(compute, B, 1, 0),
        Action(send, I, 1, 0, peer=0),
        Action(recv, F, 0, 1, peer=0),
        Action(compute, F, 1, 1),
        Action(compute, B, 1, 1),
        Action(send, I, 1, 1, peer=0),
    )


def test_one_rank_has_no_messages():
    schedule = build("gpipe", ranks=1, microbatches=3, chunks=3)
    assert channels(schedule) == ()
    assert {action.do for action in lower(schedule)[0].actions} == {Do.COMPUTE}


def test_the_turn_of_a_v_is_local():
    schedule = gpipe_on(vee(2), 2)
    assert channels(schedule) == (Channel(0, 1, 4, 1), Channel(1, 0, 4, 1))


def test_forward_only_needs_no_way_back():
    assert channels(forward_only(loop(3), 4)) == (Channel(0, 1, 4, 1), Channel(1, 2, 4, 1))


def test_messages_out_of_order_wait_in_the_pool():
    """Rank 1 begins with the last of three messages, so all three are there at once."""
    schedule = Schedule.from_csv("0F0,0F1,0F2,0B2,0B1,0B0\n1F2,1B2,1F1,1B1,1F0,1B0\n")
    assert channels(schedule) == (Channel(0, 1, 3, 3), Channel(1, 0, 3, 1))
    check(schedule, 0)


def test_every_small_registered_schedule():
    for seed, schedule in enumerate(all_small(ranks=4, microbatches=5)):
        check(schedule, seed)


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(0, 4), st.integers(0, 2**32))
def test_whatever_the_validator_accepts_runs(schedule, changes, seed):
    rng = random.Random(seed)
    for _ in range(changes):
        altered = alter(schedule, rng)
        schedule = altered if accepted(altered) else schedule
    check(schedule, seed)


def test_what_is_not_valid_is_not_lowered():
    schedule = Schedule.from_csv("0F0,0B0\n1B0,1F0\n")
    for function in (lower, channels):
        with pytest.raises(ScheduleError, match="it needs 1F0 first"):
            function(schedule)


@settings(deadline=None)
@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda p: p[0] != p[1])))
def test_rounds_hold_each_pair_once_and_each_rank_once_per_round(pairs):
    rounds = channel_rounds(pairs)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(pairs)
    for row in rounds:
        assert len({rank for pair in row for rank in pair}) == 2 * len(row)
    assert channel_rounds(sorted(pairs, reverse=True)) == rounds
    degree = max((sum(r in pair for pair in pairs) for r in range(10)), default=0)
    assert len(rounds) <= max(0, 2 * degree - 1)


@pytest.mark.parametrize(
    ("placement", "rounds"), [(loop(2), 2), (loop(8), 4), (loop(8, 2), 4), (vee(8), 4)]
)
def test_few_rounds(placement: Placement, rounds: int):
    used = [(channel.src, channel.dst) for channel in channels(gpipe_on(placement, 2))]
    assert len(channel_rounds(used)) == rounds
