"""Reordering: never longer, never more memory, and what it gains."""

from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.generators import build, gpipe_on
from megapipe.schedule.generators import reorder as module
from megapipe.schedule.generators.blocks import repeat
from megapipe.schedule.generators.reorder import compact, refill, reorder
from megapipe.schedule.generators.v_family import (
    one_f_one_b_v_block,
    v_half_block,
    v_min_block,
    v_zb_block,
)
from megapipe.schedule.ir import Kind
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop, mirrored, vee
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate
from megapipe.schedule.timing.times import in_ticks
from tests.unit.schedule.schedule_cases import of
from tests.unit.schedule.schedule_times import lines

times = st.fractions(min_value=Fraction(1, 5), max_value=4, max_denominator=5)
NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "hanayo", "zb_h1", "zb_h2", "zb_v", "v_half"]
BLOCKS = [v_min_block, v_half_block, v_zb_block, one_f_one_b_v_block]


@st.composite
def plain(draw):
    """Draw a schedule that can be reordered."""
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    if draw(st.booleans()):
        return repeat(draw(st.sampled_from(BLOCKS))(p), m)
    return build(draw(st.sampled_from(NAMES)), ranks=p, microbatches=m)


@st.composite
def costs(draw, stages):
    def each():
        return draw(times | st.lists(times, min_size=stages, max_size=stages).map(tuple))

    return Cost(each(), each(), each(), latency=draw(st.sampled_from([0, Fraction(1, 3)])))


def starts(schedule):
    timeline = simulate(schedule)
    return {
        op: start
        for rank, row in enumerate(timeline.starts)
        for op, start in zip(schedule.rank_ops(rank), row, strict=True)
    }


@given(plain())
def test_compact_makes_no_operation_later_and_no_peak_higher(schedule):
    result = compact(schedule)
    report = validate(result)
    assert report.bitwise_order
    assert max(report.peak_held) <= max(validate(schedule).peak_held)
    before, after = starts(schedule), starts(result)
    assert before.keys() == after.keys()
    assert all(after[op] <= start for op, start in before.items())


@pytest.mark.full
@given(st.data())
def test_refill_is_never_longer_and_moves_weight_gradients_alone(data):
    schedule = data.draw(plain())
    cost = data.draw(costs(schedule.placement.stages))
    result = refill(schedule, cost)
    report = validate(result)
    assert report.bitwise_order
    assert max(report.peak_held) <= max(validate(schedule).peak_held)
    assert simulate(result, cost).makespan <= simulate(schedule, cost).makespan
    for rank in range(schedule.placement.ranks):
        both = [
            [op for op in each.rank_ops(rank) if op.kind != Kind.W] for each in (schedule, result)
        ]
        assert both[0] == both[1]


def test_compact_fills_the_gaps_that_fit():
    """0F1 and 1F1 move ahead; 0F2 does not, as the rank held two activations at most."""
    schedule = of("0F0 0B0 0F1 0F2 0B1 0B2/1F0 1B0 1F1 1B1 1F2 1B2", 3)
    assert lines(compact(schedule)) == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]
    assert (simulate(schedule).makespan, simulate(compact(schedule)).makespan) == (15, 12)


def test_refill_runs_weight_gradients_where_the_rank_waits():
    schedule = of("0F0 0F1 0I0 0W0 0I1 0W1/1F0 1I0 1W0 1F1 1I1 1W1", 2)
    assert lines(refill(schedule)) == [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "1F0 1I0 1F1 1I1 1W0 1W1",
    ]
    assert (simulate(schedule).makespan, simulate(refill(schedule)).makespan) == (8, 7)


def test_refill_starts_a_weight_gradient_that_ends_too_late_where_that_is_shorter():
    """Rank 0 waits for one unit of time, and its W takes three halves."""
    schedule = of("0F0 0F1 0I0 0I1 0W0 0W1/1F0 1I0 1F1 1I1 1W0 1W1", 2)
    cost = Cost(W=(Fraction(3, 2), 0))
    assert lines(refill(schedule, cost))[0] == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert (simulate(schedule, cost).makespan, simulate(refill(schedule, cost), cost).makespan) == (
        9,
        8,
    )


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 8), st.booleans())
def test_attempts_take_the_time_that_the_simulator_gives(data, p, m, eager):
    name = data.draw(st.sampled_from(["zb_h1", "zb_v", "v_half", "grouped_interleaved"]))
    schedule = build(name, ranks=p, microbatches=m)
    stages = schedule.placement.stages
    times = st.fractions(0, 4, max_denominator=3)
    rows = [tuple(data.draw(times) for _ in range(stages)) for _ in range(3)]
    cost, _ = in_ticks(schedule.placement, Cost(*rows, latency=data.draw(times)))
    attempt = module._refilled(
        Dependencies(schedule), cost, max(map(most_held, schedule.ops)), eager
    )
    validate(attempt.schedule)
    assert module._timed(simulate(attempt.schedule, cost)) == attempt


@pytest.mark.parametrize(
    "more", [{"reduce": (9, 0)}, {"gather": (0, 9)}, {"jitter": 0.5}, {"overlap": False}]
)
def test_refill_is_never_longer_at_any_cost(more):
    schedule = build("1f1b", ranks=2, microbatches=6)
    split = of("0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2/1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2", 3)
    cost = Cost((2, 3), (3, 2), (1, 2), latency=1, **more)
    for given_order in (schedule, split):
        shorter = refill(given_order, cost)
        validate(shorter)
        assert simulate(shorter, cost).makespan <= simulate(given_order, cost).makespan


@pytest.mark.parametrize(("more", "simulations"), [({}, 1), ({"reduce": 1}, 3), ({"gather": 2}, 3)])
def test_attempts_are_simulated_only_where_their_times_are_not_known(more, simulations):
    schedule = build("zb_h1", ranks=3, microbatches=6)
    with mock.patch.object(module, "simulate", side_effect=simulate) as spy:
        refill(schedule, Cost(F=2, I=3, W=1, latency=1, **more))
    assert spy.call_count == simulations


def test_reorder_without_gaps_changes_nothing():
    for name in ("zb_h1", "1f1b"):
        one = build(name, ranks=1, microbatches=4)
        assert reorder(one).ops == one.ops


@pytest.mark.parametrize(
    "schedule",
    [
        gpipe_on(vee(2), 2, slices=2),
        gpipe_on(mirrored(loop(2)), 2, direction=(0, 1)),
        replace(build("1f1b", ranks=2, microbatches=2), recompute=frozenset({0})),
        of("0F0+0F1 0B0 0B1", 2),
    ],
)
def test_what_cannot_be_reordered(schedule):
    for change in (compact, refill):
        with pytest.raises(ScheduleError, match="only schedules of whole micro-batches with one"):
            change(schedule)


def test_times_may_be_whole_but_for_one():
    schedule = build("zb_v", ranks=2, microbatches=5)
    for cost in (Cost(F=2, I=1.5, W=2), Cost(F=2, I=Fraction(3, 2), W=2, latency=0.25)):
        shorter = refill(schedule, cost)
        validate(shorter)
        assert simulate(shorter, cost).makespan <= simulate(schedule, cost).makespan
