"""The validator: its messages, and an independent referee on altered schedules."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule import wavefront
from megapipe.schedule.channels import Channel, channels
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Schedule, pack, packed
from megapipe.schedule.placement import Placement, loop, mirrored, vee
from megapipe.schedule.proof import rank_lists
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import (
    WALKS,
    accepted,
    alter,
    counted_rounds,
    dealt,
    of,
    schedules,
)
from tests.unit.schedule.schedule_referee import gradients_in_order, peaks, play

BOTH = mirrored(loop(2))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of("0F0/1F0 1B0"), r"rank 0: 0B0 \(or an I and a W\) is missing from its list of 1 op"),
        (of("0F0 0I0"), r"rank 0: 0W0 is missing from its list of 2"),
        (  # what rank 0 still holds at its end is not counted on rank 1
            of("0F0 0F1 0B0/1F0 1B0 1F1 1B1", 2, activation_bound=(2, 1)),
            r"rank 0: 0B1 \(or an I and a W\) is missing from its list of 3",
        ),
        (of("0F0 0B0", 2), r"rank 0: 0F1 is missing from its list of 2"),
        (of("0F0 0F0 0B0"), r"rank 0, op 1 \(0F0\): duplicate of op 0"),
        (of("0F0 0I0 0W0 0W0"), r"rank 0, op 3 \(0W0\): duplicate of op 2"),
        (of("0F0 0B0 0B0"), r"rank 0, op 2 \(0B0\): duplicate of op 1"),
        (of("0F0 0I0 0I0 0W0"), r"rank 0, op 2 \(0I0\): duplicate of op 1"),
        (of("0F0 0B0 0I0"), r"rank 0, op 2 \(0I0\): the fused 0B0 \(op 1\) did this already"),
        (of("0F0 0B0 0W0"), r"rank 0, op 2 \(0W0\): the fused 0B0 \(op 1\) did this already"),
        (of("0F0 0I0 0B0"), r"rank 0, op 2 \(0B0\): the split backward began at op 1 already"),
        (of("0F0 0W0 0I0"), r"rank 0, op 1 \(0W0\): it needs 0I0 first, which is op 2"),
        (of("0F0 0W0"), r"rank 0, op 1 \(0W0\): it needs 0I0 first, which is missing"),
        (of("0B0 0F0"), r"rank 0, op 0 \(0B0\): it needs 0F0 first, which is op 1"),
        (of("0B0"), r"rank 0, op 0 \(0B0\): it needs 0F0 first, which is missing"),
        (of("0F0 0B0 0F3"), r"rank 0, op 2 \(0F3\): out of range: micro-batches go from 0 to 0"),
        (
            of("0F0 1F0 1B0 0B0", placement=loop(1)),
            r"rank 0, op 1 \(1F0\): out of range: stages go from 0 to 0",
        ),
        (
            of("0F0 0B0/1F0 1B0", placement=Placement(2, ((1, 0),))),
            r"rank 0, op 0 \(0F0\): stage 0 is on rank 1",
        ),
        (
            of("0F0 0B0", forward_only=True),
            r"rank 0, op 1 \(0B0\): a forward-only schedule has no backward",
        ),
        (
            of("0F0 0F1 0B0 0B1", 2, activation_bound=(1,)),
            r"rank 0, op 1 \(0F1\): from .*, the rank holds 2 activations, more than the 1 prom",
        ),
        (
            of("0F0 0B0/1B0 1F0"),
            r"rank 1, op 0 \(1B0\): it needs 1F0 first, which is op 1",
        ),
    ],
)
def test_messages(schedule, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of("0F0.1 0B0"), r"rank 0, op 0 \(0F0.1\): out of range: slices go from 0 to 0"),
        (
            of("0F0.1 0F0 0B0.1 0B0", slices=2),
            r"rank 0, op 0 \(0F0.1\): it needs 0F0 first, which is op 1",
        ),
        (
            of("0F0 0F0.1 0B0 0B0.1", slices=2),
            r"rank 0, op 2 \(0B0\): it needs 0B0.1 first, which is op 3",
        ),
        (
            of("0F0 0F0.1 0I0 0I0.1 0W0 0W0.1", slices=2),
            r"rank 0, op 2 \(0I0\): it needs 0I0.1 first, which is op 3",
        ),
        (
            of("0F0 0F0.1 0B0 0I0.1 0W0.1", slices=2),
            r"rank 0, op 2 \(0B0\): it needs 0I0.1 first, which is op 3",
        ),
        (of("0F0 0B0", slices=2), r"rank 0, op 1 \(0B0\): it needs 0B0.1 first, which is missing"),
        (of("0F0 0F0.1 0B0.1", slices=2), r"rank 0: 0B0 \(or an I and a W\) is missing"),
        (of("0F0", slices=2, forward_only=True), r"rank 0: 0F0.1 is missing from its list of 1"),
        (
            of("0F0 0F0.1 0F0.1 0B0.1 0B0", slices=2),
            r"rank 0, op 2 \(0F0.1\): duplicate of op 1",
        ),
    ],
)
def test_messages_about_slices(schedule, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    assert "\n" not in str(caught.value)


ZERO = {"recompute": frozenset({0})}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of("0F0 0R0 0B0"), r"rank 0, op 1 \(0R0\): stage 0 does not recompute; name it in the"),
        (of("0R0 0F0 0B0", **ZERO), r"op 0 \(0R0\): it needs 0F0 first, which is op 1"),
        (of("0F0 0R0 0R0 0B0", **ZERO), r"op 2 \(0R0\): duplicate of op 1"),
        (of("0F0 0B0 0R0", **ZERO), r"op 2 \(0R0\): the fused 0B0 \(op 1\) did this already"),
        (of("0F0 0I0 0R0 0W0", **ZERO), r"op 2 \(0R0\): the split backward began at op 1 already"),
        (of("0F0 0R0 0W0 0I0", **ZERO), r"op 2 \(0W0\): it needs 0I0 first, which is op 3"),
        (of("0F0 0R0", **ZERO), r"rank 0: 0B0 \(or an I and a W\) is missing"),
        (
            of("0F0 0F1 0R0 0R1 0B0 0B1", 2, activation_bound=(1,), **ZERO),
            r"op 3 \(0R1\): .* holds 2 act",
        ),
        (
            of("0F0 0F1 0R0 0B1 0B0", 2, activation_bound=(1,), **ZERO),
            r"op 3 \(0B1\): .* holds 2 activ",
        ),
        (
            of("0F0 0B0", recompute=frozenset({1})),
            r"schedule x: recompute names stage 1; stages go from 0 to 0",
        ),
        (
            of("0F0 0F0.1 0B0.1 0B0", slices=2, **ZERO),
            r"schedule x: recomputation together with 2 slices is not supported",
        ),
        (
            of("0F0 0R0", forward_only=True, **ZERO),
            r"rank 0, op 1 \(0R0\): a forward-only schedule has no backward",
        ),
    ],
)
def test_messages_about_recomputation(schedule, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of("0F0 0B0+"), r"rank 0, op 1 \(0B0\): it is joined with the next operation, but it is"),
        (
            of("0F0 0F1+0B0+0B1", 2),
            r"rank 0, op 1 \(0F1\): it is joined with 0B0, which is joined with a third operation",
        ),
        (
            of("0F0+0B0"),
            r"rank 0, op 0 \(0F0\): it is joined with 0B0, which is of the same micro-batch",
        ),
        (
            of("0F0+0F0.1 0B0.1 0B0", slices=2),
            r"op 0 \(0F0\): it is joined with 0F0.1, which is of the same micro-batch",
        ),
        (of("0F0+0F1 0B0 0B1 0B0", 2), r"rank 0, op 4 \(0B0\): duplicate of op 2"),
    ],
)
def test_messages_about_joined_operations(schedule, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    assert "\n" not in str(caught.value)


def test_a_micro_batch_stays_in_its_replica():
    text = "0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1"
    assert validate(of(text, 2, BOTH, direction=(0, 1))).ops == 8
    with pytest.raises(
        ScheduleError, match=r"rank 0, op 0 \(0F0\): stage 0 of micro-batch 0 is on rank 1"
    ):
        validate(of(text, 2, BOTH, direction=(1, 0)))
    with pytest.raises(ScheduleError, match=r"stage 1 of micro-batch 1 is on rank 1"):
        validate(of(text, 2, BOTH))


LARGE = (pack(6, 0, 0), pack(15, 0, 0), -1, -(1 << 20), -(1 << 62), 1 << 61, 1 << 62)


@pytest.mark.parametrize("code", LARGE)
@pytest.mark.parametrize("slices", [1, 2])
def test_no_such_operation(code, slices):
    schedule = Schedule("x", loop(1), 1, (packed([code]),), slices=slices)
    with pytest.raises(ScheduleError, match=rf"rank 0, op 0 \(code {code}\): no such operation"):
        validate(schedule)


def test_deadlock_names_the_operations_that_wait_for_each_other():
    schedule = of("0F0 0B0 0F1 0B1/1F1 1B1 1F0 1B0", 2)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert str(caught.value) == (
        "schedule x: deadlock: rank 0 op 1 (0B0) waits for 1B0, op 3 of rank 1; "
        "rank 1 op 0 (1F1) waits for 0F1, op 2 of rank 0"
    )


def test_many_ranks_are_proved_abreast():
    schedule = build("zb_h1", ranks=32, microbatches=40)
    with counted_rounds() as counts:
        report = validate(schedule)
    assert sum(counts) == report.ops


@pytest.mark.parametrize("walk", WALKS)
def test_joined_operations_wait_for_the_inputs_of_both(walk):
    """1F0 cannot make what 0B0 waits for before 0F1, which comes after 0B0, is there."""
    apart = of("0F0 0B0 0F1 0B1/1F0 1B0 1F1 1B1", 2)
    assert validate(apart).ops == 8
    schedule = of("0F0 0B0 0F1 0B1/1F0 1B0+1F1 1B1", 2)
    with (
        mock.patch.multiple(wavefront, **WALKS[walk]),
        pytest.raises(ScheduleError) as caught,
    ):
        validate(schedule)
    assert str(caught.value) == (
        "schedule x: deadlock: rank 0 op 1 (0B0) waits for 1B0, op 1 of rank 1; "
        "rank 1 op 1 (1B0) waits for 0F1, op 2 of rank 0"
    )


def test_deadlock_between_slices():
    schedule = of("0F0 0F0.1 0B0.1 0B0/1F0 1B0 1F0.1 1B0.1", slices=2)
    with pytest.raises(ScheduleError, match=r"op 1 \(1B0\): it needs 1B0.1 first, which is op 3"):
        validate(schedule)
    schedule = of("0F0 0B0.1 0F0.1 0B0/1F0 1F0.1 1B0.1 1B0", slices=2)
    with pytest.raises(ScheduleError, match=r"op 1 \(0B0.1\): it needs 0F0.1 first, which is op 2"):
        validate(schedule)
    schedule = of("0F0 0F0.1 0B0.1 0B0/1F0 1F0.1 1F1 1F1.1 1B0.1 1B0", 2, slices=2)
    schedule = of(
        "0F0 0F0.1 0B0.1 0B0 0F1 0F1.1 0B1.1 0B1/1F0 1F1 1F0.1 1F1.1 1B0.1 1B0 1B1.1 1B1",
        2,
        slices=2,
    )
    with pytest.raises(
        ScheduleError, match=r"rank 0 op 2 \(0B0.1\) waits for 1B0.1, op 4 of rank 1"
    ):
        validate(schedule)


def test_deadlock_within_one_rank():
    schedule = of("0F0 3F0 3B0 0B0/2F0 1F0 2B0 1B0", placement=vee(2))
    with pytest.raises(ScheduleError, match=r"rank 1 op 0 \(2F0\) waits for 1F0, op 1 of rank 1"):
        validate(schedule)


def test_a_long_circle_is_cut_short():
    ops = tuple(packed([pack(0, 12 + rank, 0), pack(0, rank, 0)]) for rank in range(12))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 op 0 \(12F0\) .*; \.\.\. 5 more$"):
        validate(Schedule("x", loop(12, 2), 1, ops, forward_only=True))


def test_bitwise_order_is_reported_per_stage_for_inputs_and_weights():
    assert validate(of("0F0 0F1 0B0 0B1", 2)).bitwise_order
    assert not validate(of("0F0 0F1 0B1 0B0", 2)).bitwise_order
    assert not validate(of("0F0 0F1 0I1 0I0 0W0 0W1", 2)).bitwise_order
    assert not validate(of("0F0 0F1 0I0 0I1 0W1 0W0", 2)).bitwise_order
    assert not validate(of("0F0 0F1 0I0 0B1 0W0", 2)).bitwise_order
    assert validate(of("0F0 0F1 0I0 0W0 0B1", 2)).bitwise_order


def test_bitwise_order_of_slices_replicas_and_parts():
    half = Fraction(1, 2)
    parts = {"sizes": (half, half, Fraction(1))}
    assert validate(of("0F2 0F0 0F1 0B0 0B1 0B2", 3, **parts)).bitwise_order
    assert not validate(of("0F2 0F0 0F1 0B2 0B0 0B1", 3, **parts)).bitwise_order
    assert validate(of("0F0 0F0.1 0I0.1 0I0 0W0.1 0W0", slices=2)).bitwise_order
    assert not validate(of("0F0 0F0.1 0I0.1 0I0 0W0 0W0.1", slices=2)).bitwise_order
    text = "0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1"
    assert validate(of(text, 2, BOTH, direction=(0, 1))).bitwise_order
    meeting = of("0F1 0B1 0F0 0B0", 2, mirrored(loop(1)), direction=(0, 1))
    assert not validate(meeting).bitwise_order  # directions on one rank share the stage
    backwards = "0F0 1F1 1F3 1B3 1B1 0B0 0F2 0B2/0F1 0F3 1F0 1B0 0B3 0B1 1F2 1B2"
    assert not validate(of(backwards, 4, BOTH, direction=(0, 1, 0, 1))).bitwise_order


def test_the_peak_counts_until_the_weight_gradient():
    assert validate(of("0F0 0I0 0F1 0I1 0W0 0W1", 2)).peak_held == (2,)
    assert validate(of("0F0 0I0 0W0 0F1 0I1 0W1", 2)).peak_held == (1,)
    assert validate(forward_only(loop(2), 5)).peak_held == (0, 0)


def test_the_peak_counts_from_the_recomputation():
    assert validate(of("0F0 0F1 0R0 0B0 0R1 0B1", 2, **ZERO)).peak_held == (1,)
    assert validate(of("0F0 0F1 0R0 0R1 0B0 0B1", 2, **ZERO)).peak_held == (2,)
    assert validate(of("0F0 0F1 0B0 0B1", 2, **ZERO)).peak_held == (1,)
    assert validate(of("0F0 0F1 0I0 0I1 0W0 0W1", 2, **ZERO)).peak_held == (2,)
    assert validate(of("0F0 0F1 0R1 0B0 0B1", 2, **ZERO)).peak_held == (2,)
    assert validate(of("0F0 0F1 0B0 0B1", 2, forward_only=False)).peak_held == (2,)


def test_the_peak_counts_slices_and_parts_as_one_each():
    halves = (Fraction(1, 2),) * 2
    assert validate(of("0F0 0F0.1 0B0.1 0B0", slices=2)).peak_held == (2,)
    assert validate(of("0F0+0F1 0B0 0B1", 2, sizes=halves)).peak_held == (2,)


def test_channels_of_a_bidirectional_schedule():
    text = "0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1"
    schedule = of(text, 2, BOTH, direction=(0, 1))
    assert channels(schedule) == (Channel(0, 1, 2, 1), Channel(1, 0, 2, 1))


def test_joined_operations_hold_both_inputs_at_once():
    apart = of("0F0 0F1 0B0 0B1/1F0 1F1 1B0 1B1", 2)
    joined = of("0F0 0F1 0B0 0B1/1F0+1F1 1B0 1B1", 2)
    assert channels(apart) == (Channel(0, 1, 2, 1), Channel(1, 0, 2, 1))
    assert channels(joined) == (Channel(0, 1, 2, 2), Channel(1, 0, 2, 1))


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule",
    [
        build("1f1b", ranks=2, microbatches=2),
        build("zb_h1", ranks=2, microbatches=1),
        gpipe_on(vee(2), 1),
        forward_only(vee(2), 2),
        of("0F0 0F0.1 0I0.1 0B0 0W0.1/1F0 1F0.1 1B0.1 1B0", slices=2),
        of("0F0 0F1 0R0 0I0 0W0 0B1", 2, **ZERO),
        of("0F0 1F1 1B1+0B0/0F1 1F0 1B0 0B1", 2, BOTH, direction=(0, 1)),
    ],
    ids=["1f1b", "zb_h1", "vee", "forward_only", "slices", "recompute", "directions"],
)
def test_every_order_of_a_tiny_schedule(schedule):
    """All permutations of every rank's list: the validator and the referee agree on each."""
    harmless = harmful = 0
    for orders in product(*(permutations(ops) for ops in schedule.ops)):
        altered = replace(schedule, ops=tuple(map(packed, orders)), activation_bound=None)
        fine = play(altered) is None
        assert accepted(altered) == fine, to_csv(altered)
        harmless += fine
        harmful += not fine
    assert harmless >= 1
    assert harmful >= 1


@in_parts("walk", WALKS, default=["a loop"], full=1)
@settings(max_examples=200)
@given(schedules(), st.integers(0, 4), st.integers(0, 2**32))
def test_altered_schedules_are_judged_as_the_token_game_judges(walk, schedule, changes, seed):
    rng = random.Random(seed)
    for _ in range(changes):
        schedule = alter(schedule, rng)
    with mock.patch.multiple(wavefront, **WALKS[walk]):
        assert accepted(schedule) == (play(schedule) is None), to_csv(schedule)


@pytest.mark.full
@settings(max_examples=200)
@given(schedules(), st.integers(1, 3), st.integers(0, 2**32))
def test_ranks_that_are_read_together_get_the_error_of_one_alone(schedule, changes, seed):
    rng = random.Random(seed)
    for _ in range(changes):
        schedule = alter(schedule, rng)
    found = []
    for at_once in (1, 20, 1 << 18):
        with mock.patch.object(rank_lists, "AT_ONCE", at_once):
            try:
                found.append(validate(schedule))
            except ScheduleError as error:
                found.append(str(error))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("lengths", "together"),
    [
        ([3, 3, 1, 7, 2], [[0, 1], [2], [3], [4]]),
        ([7, 7], [[0], [1]]),
        ([0, 6, 0, 1], [[0, 1, 2], [3]]),
        ([], [[]]),
    ],
)
def test_six_operations_are_read_at_once_or_those_of_one_rank(lengths, together):
    with mock.patch.object(rank_lists, "AT_ONCE", 6):
        assert [[*ranks] for ranks in rank_lists._batches(lengths)] == together


@pytest.mark.full
@settings(max_examples=150)
@given(dealt())
def test_reports_are_those_of_the_token_game(schedule):
    report = validate(schedule)
    assert report.ops == sum(map(len, schedule.ops))
    assert report.peak_held == peaks(schedule)
    assert report.bitwise_order == gradients_in_order(schedule)


def test_both_verdicts_are_frequent():
    """The comparison above has substance: single changes are often harmless, often harmful."""
    rng = random.Random(0)
    verdicts = []
    for base in (
        build("interleaved_1f1b", ranks=3, microbatches=4, chunks=2, microbatch_group_size=2),
        build("zb_h1", ranks=3, microbatches=4),
        forward_only(vee(3), 4),
        of("0F0 0F0.1 0I0.1 0B0 0W0.1/1F0 1F0.1 1B0.1 1B0", slices=2),
        of("0F0 0F1 0R0 0I0 0W0 0B1", 2, **ZERO),
        of("0F0 1F1 1B1+0B0/0F1 1F0 1B0 0B1", 2, BOTH, direction=(0, 1)),
    ):
        for _ in range(200):
            altered = alter(base, rng)
            verdicts.append(play(altered) is None)
            assert accepted(altered) == verdicts[-1], to_csv(altered)
    assert min(verdicts.count(True), verdicts.count(False)) > 200
