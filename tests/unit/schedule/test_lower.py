"""Lowering: explicit messages on one-way channels."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.channels import Channel, channels
from megapipe.schedule.generators import build, forward_only, gpipe_on, names
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import channel_rounds, lower
from megapipe.schedule.placement import Placement, loop, mirrored, vee
from megapipe.schedule.program import Action, ActionKind
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import accepted, all_small, alter, of, schedules
from tests.unit.schedule.schedule_referee import run_programs

F, B, I, R = Kind.F, Kind.B, Kind.I, Kind.R  # noqa: E741
COMPUTE, SEND, RECV = ActionKind.COMPUTE, ActionKind.SEND, ActionKind.RECV


def carries(action):
    return action[1:5]


def check(schedule, seed):
    programs = lower(schedule)
    assert [program.rank for program in programs] == list(range(schedule.placement.ranks))
    for program in programs:
        computed = [action for action in program.actions if action.do == COMPUTE]
        assert all(action.peer == -1 and action.acks == 0 for action in computed)
        check_blocks(program.actions, schedule.rank_ops(program.rank))
    run_programs(schedule, programs, channels(schedule), seed)


def check_blocks(actions, ops):
    """Assert late receives, sends at once, and nothing between joined operations."""
    rest = list(actions)
    while ops:
        group, ops = (ops[:2], ops[2:]) if ops[0].joined else (ops[:1], ops[1:])
        needed = [
            (F, op.stage - 1, *op[2:4]) if op.kind == F else (I, op.stage + 1, *op[2:4])
            for op in group
            if op.kind in (F, B, I)
        ]
        made = [(F if op.kind == F else I, *op[1:4]) for op in group if op.kind in (F, B, I)]
        latest = {}
        while rest[0].do == RECV:
            action = rest.pop(0)
            latest[action.peer] = carries(action)
        assert set(latest.values()) <= set(needed)
        assert [carries(rest.pop(0)) for _ in group] == [op[:4] for op in group]
        while rest and rest[0].do == SEND:
            made = made[made.index(carries(rest.pop(0))) + 1 :]
    assert not rest


def test_program_of_two_ranks():
    first, second = lower(build("1f1b", ranks=2, microbatches=2))
    assert first.actions == (
        Action(COMPUTE, F, 0, 0),
        Action(SEND, F, 0, 0, peer=1),
        Action(COMPUTE, F, 0, 1),
        Action(SEND, F, 0, 1, peer=1),
        Action(RECV, I, 1, 0, peer=1, acks=1),
        Action(COMPUTE, B, 0, 0),
        Action(RECV, I, 1, 1, peer=1, acks=1),
        Action(COMPUTE, B, 0, 1),
    )
    assert second.actions == (
        Action(RECV, F, 0, 0, peer=0),
        Action(COMPUTE, F, 1, 0),
        Action(COMPUTE, B, 1, 0),
        Action(SEND, I, 1, 0, peer=0),
        Action(RECV, F, 0, 1, peer=0),
        Action(COMPUTE, F, 1, 1),
        Action(COMPUTE, B, 1, 1),
        Action(SEND, I, 1, 1, peer=0),
    )


def test_program_of_joined_operations():
    """What both need is taken before, what both make is sent after."""
    _, second = lower(of("0F0 0F1 0B0 0B1/1F0 1F1+1B0 1B1", 2))
    assert second.actions == (
        Action(RECV, F, 0, 0, peer=0),
        Action(COMPUTE, F, 1, 0),
        Action(RECV, F, 0, 1, peer=0),
        Action(COMPUTE, F, 1, 1),
        Action(COMPUTE, B, 1, 0),
        Action(SEND, I, 1, 0, peer=0),
        Action(COMPUTE, B, 1, 1),
        Action(SEND, I, 1, 1, peer=0),
    )


def test_program_of_slices():
    _, second = lower(of("0F0 0F0.1 0B0.1 0B0/1F0 1F0.1 1B0.1 1B0", slices=2))
    assert second.actions == (
        Action(RECV, F, 0, 0, 0, peer=0),
        Action(COMPUTE, F, 1, 0, 0),
        Action(RECV, F, 0, 0, 1, peer=0),
        Action(COMPUTE, F, 1, 0, 1),
        Action(COMPUTE, B, 1, 0, 1),
        Action(SEND, I, 1, 0, 1, peer=0),
        Action(COMPUTE, B, 1, 0, 0),
        Action(SEND, I, 1, 0, 0, peer=0),
    )


def test_program_of_two_replicas():
    """Each rank is first for one micro-batch and last for the other."""
    schedule = of("0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1", 2, mirrored(loop(2)), direction=(0, 1))
    first, _ = lower(schedule)
    assert first.actions == (
        Action(COMPUTE, F, 0, 0),
        Action(SEND, F, 0, 0, peer=1),
        Action(RECV, F, 0, 1, peer=1),
        Action(COMPUTE, F, 1, 1),
        Action(COMPUTE, B, 1, 1),
        Action(SEND, I, 1, 1, peer=1),
        Action(RECV, I, 1, 0, peer=1, acks=1),
        Action(COMPUTE, B, 0, 0),
    )


def test_recomputation_sends_nothing():
    schedule = of("0F0 0R0 0B0/1F0 1R0 1B0", recompute=frozenset({0, 1}))
    assert [action[:3] for action in lower(schedule)[0].actions] == [
        (COMPUTE, F, 0),
        (SEND, F, 0),
        (COMPUTE, R, 0),
        (RECV, I, 1),
        (COMPUTE, B, 0),
    ]


@settings(max_examples=50)
@given(schedules())
def test_some_ranks_alone_are_as_among_all(schedule):
    programs = lower(schedule)
    for rank in range(schedule.placement.ranks):
        assert lower(schedule, [rank]) == (programs[rank],)


def test_one_rank_has_no_messages():
    schedule = build("gpipe", ranks=1, microbatches=3, chunks=3)
    assert channels(schedule) == ()
    assert {action.do for action in lower(schedule)[0].actions} == {ActionKind.COMPUTE}


def test_the_turn_of_a_v_is_local():
    schedule = gpipe_on(vee(2), 2)
    assert channels(schedule) == (Channel(0, 1, 4, 1), Channel(1, 0, 4, 1))


def test_forward_only_needs_no_way_back():
    assert channels(forward_only(loop(3), 4)) == (Channel(0, 1, 4, 1), Channel(1, 2, 4, 1))


def test_messages_out_of_order_wait_in_the_pool():
    """Rank 1 begins with the last of three messages, so all three are there at once."""
    schedule = of("0F0 0F1 0F2 0B2 0B1 0B0/1F2 1B2 1F1 1B1 1F0 1B0", 3)
    assert channels(schedule) == (Channel(0, 1, 3, 3), Channel(1, 0, 3, 1))
    check(schedule, 0)


@in_parts("name", names(), default=4, full=1)
def test_small_registered_schedules(name):
    for seed, schedule in enumerate(all_small(name, ranks=4, microbatches=4)):
        check(schedule, seed)


@settings(max_examples=100)
@given(schedules(), st.integers(0, 4), st.integers(0, 2**32))
def test_whatever_the_validator_accepts_runs(schedule, changes, seed):
    rng = random.Random(seed)
    for _ in range(changes):
        altered = alter(schedule, rng)
        schedule = altered if accepted(altered) else schedule
    check(schedule, seed)


def test_what_is_not_valid_is_not_lowered():
    with pytest.raises(ScheduleError, match="it needs 1F0 first"):
        lower(of("0F0 0B0/1B0 1F0"))


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
