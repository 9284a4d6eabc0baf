"""The validator: its messages, and an independent referee on altered schedules."""

import random
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import schedules
from token_game import play

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Kind, Schedule, pack, packed
from megapipe.schedule.placement import Placement, loop, vee
from megapipe.schedule.validate import validate


def accepted(schedule):
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def of(text, microbatches=1, placement=None, **fields):
    """A schedule from rows of cells, with sizes of its own."""
    read = Schedule.from_csv(text.replace(" ", ",").replace("/", "\n"), name="x")
    return Schedule("x", placement or read.placement, microbatches, read.ops, **fields)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (of("0F0/1F0 1B0"), r"rank 0: 0B0 \(or an I and a W\) is missing from its list of 1 op"),
        (of("0F0 0I0"), r"rank 0: 0W0 is missing from its list of 2"),
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
        (of("0F0.1 0B0"), r"rank 0, op 0 \(0F0.1\): slices and flags are not supported"),
        (of("0F0 0R0 0B0"), r"rank 0, op 1 \(0R0\): recomputation .* is not supported"),
        (
            of("0F0 0B0", forward_only=True),
            r"rank 0, op 1 \(0B0\): a forward-only schedule has no backward",
        ),
        (
            of("0F0 0F1 0B0 0B1", 2, held_limit=(1,)),
            r"rank 0, op 1 \(0F1\): 2 chunk activations are held from here, more than the 1 prom",
        ),
        (
            of("0F0 0B0/1B0 1F0"),
            r"rank 1, op 0 \(1B0\): it needs 1F0 first, which is op 1",
        ),
        (
            of("0F0 0F1 0B0 0B1/1F1 1B1 1F0 1B0", 2, Placement(2, ((0, 1), (1, 0)))),
            r"2 replicas; only one is supported",
        ),
    ],
)
def test_messages(schedule, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(schedule)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [pack(5, 0, 0), pack(15, 0, 0), -1, -(1 << 20)])
def test_no_such_operation(code):
    schedule = Schedule("x", loop(1), 1, (packed([code]),))
    with pytest.raises(ScheduleError, match=rf"rank 0, op 0 \(code {code}\): no such operation"):
        validate(schedule)


def test_a_flag_is_refused():
    codes = [pack(0, 0, 0) | 1 << 60, pack(1, 0, 0)]
    with pytest.raises(ScheduleError, match="flags are not supported"):
        validate(Schedule("x", loop(1), 1, (packed(codes),)))


def test_deadlock_names_the_operations_that_wait_for_each_other():
    schedule = of("0F0 0B0 0F1 0B1/1F1 1B1 1F0 1B0", 2)
    with pytest.raises(ScheduleError) as caught:
        validate(schedule)
    assert str(caught.value) == (
        "schedule x: deadlock: rank 0 op 1 (0B0) waits for 1B0, op 3 of rank 1; "
        "rank 1 op 0 (1F1) waits for 0F1, op 2 of rank 0"
    )


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


def test_the_peak_counts_until_the_weight_gradient():
    assert validate(of("0F0 0I0 0F1 0I1 0W0 0W1", 2)).peak_held == (2,)
    assert validate(of("0F0 0I0 0W0 0F1 0I1 0W1", 2)).peak_held == (1,)
    assert validate(forward_only(loop(2), 5)).peak_held == (0, 0)


@pytest.mark.parametrize(
    "schedule",
    [
        build("1f1b", ranks=2, microbatches=2),
        build("zb_h1", ranks=2, microbatches=1),
        gpipe_on(vee(2), 1),
        forward_only(vee(2), 2),
    ],
    ids=["1f1b", "zb_h1", "vee", "forward_only"],
)
def test_every_order_of_a_tiny_schedule(schedule):
    """All permutations of every rank's list: the validator and the referee agree on each."""
    harmless = harmful = 0
    for orders in product(*(permutations(ops) for ops in schedule.ops)):
        altered = Schedule(
            schedule.name,
            schedule.placement,
            schedule.microbatches,
            tuple(packed(order) for order in orders),
            forward_only=schedule.forward_only,
        )
        fine = play(altered) is None
        assert accepted(altered) == fine, altered.to_csv()
        harmless += fine
        harmful += not fine
    assert harmless >= 1
    assert harmful >= 1


def alter(schedule, rng):
    """One random change: swap, move, delete, duplicate, another rank, or a field of one op."""
    lists = [schedule.rank_ops(rank) for rank in range(len(schedule.ops))]
    rank = rng.choice([rank for rank, ops in enumerate(lists) if ops] or [None])
    if rank is None:
        return schedule
    ops, other = lists[rank], rng.choice(lists)
    index = rng.randrange(len(ops))
    op = ops[index]
    change = rng.choice(["swap", "move", "near", "delete", "copy", "rank", "field", "split"])
    if change == "swap":
        second = rng.randrange(len(ops))
        ops[index], ops[second] = ops[second], op
    elif change == "near" and index:
        ops[index - 1 : index + 1] = reversed(ops[index - 1 : index + 1])
    elif change == "move":
        ops.insert(rng.randrange(len(ops)), ops.pop(index))
    elif change == "delete":
        del ops[index]
    elif change == "copy":
        other.insert(rng.randrange(len(other) + 1), op)
    elif change == "rank":
        del ops[index]
        other.insert(rng.randrange(len(other) + 1), op)
    elif change == "field":
        field = rng.choice(["kind", "stage", "microbatch", "slice"])
        value = rng.randrange(schedule.placement.stages + schedule.microbatches + 1)
        ops[index] = op._replace(**{field: Kind(value % 5) if field == "kind" else value})
    elif change == "split" and op.kind == Kind.B:
        ops[index] = op._replace(kind=Kind.I)
        ops.insert(rng.randint(index, len(ops)), op._replace(kind=Kind.W))
    return Schedule(
        schedule.name,
        schedule.placement,
        schedule.microbatches,
        tuple(packed(pack(*op) for op in ops) for ops in lists),
        schedule.held_limit if rng.random() < 0.5 else None,
        schedule.forward_only,
    )


@settings(max_examples=500, deadline=None)
@given(schedules(), st.integers(0, 4), st.integers(0, 2**32))
def test_altered_schedules_are_judged_as_the_token_game_judges(schedule, changes, seed):
    rng = random.Random(seed)
    for _ in range(changes):
        schedule = alter(schedule, rng)
    assert accepted(schedule) == (play(schedule) is None), schedule.to_csv()


def test_both_verdicts_are_frequent():
    """The comparison above has substance: single changes are often harmless, often harmful."""
    rng = random.Random(0)
    verdicts = []
    for base in (
        build("interleaved_1f1b", ranks=3, microbatches=4, chunks=2, group=2),
        build("zb_h1", ranks=3, microbatches=4),
        forward_only(vee(3), 4),
    ):
        for _ in range(200):
            altered = alter(base, rng)
            verdicts.append(play(altered) is None)
            assert accepted(altered) == verdicts[-1], altered.to_csv()
    assert min(verdicts.count(True), verdicts.count(False)) > 100
