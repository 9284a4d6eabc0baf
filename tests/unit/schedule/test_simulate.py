"""The simulator against closed forms, exactly."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import registered

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.placement import loop, vee
from megapipe.schedule.simulate import simulate

times = st.fractions(min_value=Fraction(1, 7), max_value=5, max_denominator=7)
sizes = st.integers(1, 7), st.integers(1, 16)


@settings(deadline=None)
@given(*sizes, times, times, times, st.sampled_from(["gpipe", "1f1b"]))
def test_gpipe_and_1f1b_have_p_minus_1_idle_slots(p, m, f, i, w, name):
    timeline = simulate(build(name, ranks=p, microbatches=m), Cost(f, i, w))
    assert timeline.makespan == (m + p - 1) * (f + i + w)
    assert timeline.bubble_makespan == Fraction(p - 1, m + p - 1)
    assert timeline.bubble_ideal == Fraction(p - 1, m)


@settings(deadline=None)
@given(*sizes, times, times, times)
def test_zb_h1(p, m, f, i, w):
    w = min(f, i, w)
    timeline = simulate(build("zb_h1", ranks=p, microbatches=m), Cost(f, i, w))
    if m >= p:
        assert timeline.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
    equal = simulate(build("zb_h1", ranks=p, microbatches=m), Cost(f, f, f))
    if m <= p:
        assert equal.makespan == ((m + p - 1) * 2 + 1) * f


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), times, times)
def test_interleaved_divides_the_bubble_by_the_chunks(p, groups, v, f, b):
    m = groups * p
    schedule = build("interleaved_1f1b", ranks=p, microbatches=m, chunks=v)
    timeline = simulate(schedule, Cost(F=f / v, B=b / v))
    assert timeline.makespan == m * (f + b) + (p - 1) * (f + b) / v
    assert timeline.bubble_ideal == Fraction(p - 1, v * m)
    assert timeline.bubble_makespan == Fraction(p - 1, v * m + p - 1)


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 6), st.integers(1, 4), times, times)
def test_breadth_first_divides_the_bubble_by_the_chunks(p, more, v, f, b):
    m = p + more
    timeline = simulate(build("gpipe", ranks=p, microbatches=m, chunks=v), Cost(F=f / v, B=b / v))
    assert timeline.makespan == m * (f + b) + (p - 1) * (f + b) / v


@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "group", "makespan"),
    [(4, 12, 2, 3, 84), (4, 9, 2, 4, 71), (6, 12, 2, 5, 96), (3, 7, 3, 2, 80), (4, 2, 2, 2, 27)],
)
def test_interleaved_outside_megatrons_limits(ranks, microbatches, chunks, group, makespan):
    schedule = build(
        "interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks, group=group
    )
    assert simulate(schedule).makespan == makespan


def test_forward_only_on_a_v_leaves_no_gap_once_it_runs():
    timeline = simulate(forward_only(vee(4), 6))
    assert timeline.makespan == 6 * 2 + 8 - 2
    assert timeline.spans[3] == timeline.busy[3] == 12


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 30))
def test_forward_only_on_a_loop_is_within_a_few_slots_of_the_shortest(p, v, m):
    makespan = simulate(forward_only(loop(p, v), m)).makespan
    assert makespan == m + p - 1 if v == 1 else makespan <= m * v + (p - 1) * v


def test_times_of_two_ranks_with_latency():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(2, 3, 4, latency=10))
    assert timeline.starts == ([0, 2, 31, 40], [12, 14, 21, 23])
    assert timeline.ends[0] == [2, 4, 38, 47]


def test_hand_over_within_a_rank_is_free():
    local = simulate(gpipe_on(loop(1, 2), 1), Cost(latency=100))
    assert local.makespan == 6
    crossing = simulate(gpipe_on(loop(2), 1), Cost(latency=100))
    assert crossing.makespan == 206


def test_costs_per_stage():
    cost = Cost(F=(1, 5), I=(1, 2), W=(3, 4))
    timeline = simulate(build("gpipe", ranks=2, microbatches=1), cost)
    assert timeline.starts == ([0, 12], [1, 6])
    assert timeline.ends == ([1, 16], [6, 12])
    assert timeline.busy == (5, 11)
    assert timeline.spans == (16, 11)
    assert timeline.bubble_makespan == 1 - Fraction(16, 32)
    assert timeline.bubble_ideal == 1
    assert timeline.bubble_span == Fraction(1, 2)


def test_a_span_may_be_shorter_than_the_makespan():
    """Two forwards more in the warm-up (ZB-H2): no rank idles within its own span."""
    text = (
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1I1,1F2,1I2,1F3,1I3,1W0,1W1,1W2,1W3\n"
    )
    timeline = simulate(Schedule.from_csv(text))
    assert timeline.makespan == 13
    assert timeline.spans == (12, 12)
    assert timeline.bubble_span == 0
    assert timeline.bubble_makespan == Fraction(1, 13)


@settings(max_examples=50, deadline=None)
@given(registered(), times, times, times, times)
def test_no_start_before_its_input_and_none_later_than_it_must(schedule, f, i, w, latency):
    """Every start is the latest of the rank's own last end and the arrival of the input."""
    timeline = simulate(schedule, Cost(f, i, w, latency=latency))
    home, last = schedule.placement.table[0], schedule.placement.stages - 1
    ends = {}
    for rank in range(schedule.placement.ranks):
        for op, end in zip(schedule.rank_ops(rank), timeline.ends[rank], strict=True):
            ends["F" if op.kind == Kind.F else op.kind.name, op.stage, op.microbatch] = end
    for rank in range(schedule.placement.ranks):
        before = 0
        for op, start, end in zip(
            schedule.rank_ops(rank), timeline.starts[rank], timeline.ends[rank], strict=True
        ):
            ready = before
            other = op.stage - 1 if op.kind == Kind.F else op.stage + 1
            if op.kind != Kind.W and 0 <= other <= last:
                kinds = "F" if op.kind == Kind.F else "IB"
                sent = [
                    ends[k, other, op.microbatch]
                    for k in kinds
                    if (k, other, op.microbatch) in ends
                ]
                ready = max(before, sent[0] + (latency if home[other] != rank else 0))
            assert start == ready
            assert end - start == {"F": f, "I": i, "W": w, "B": i + w}[op.kind.name]
            before = end


def test_floats_give_floats():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(0.5, 0.5, 0.5))
    assert timeline.bubble_makespan == pytest.approx(1 / 3)


def test_errors():
    schedule = build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="cost W: 3 times for 2 stages"):
        simulate(schedule, Cost(W=(1, 2, 3)))
    with pytest.raises(ScheduleError, match="cost F: -1 is negative"):
        simulate(schedule, Cost(F=(1, -1)))
    with pytest.raises(ScheduleError, match="cost latency: -1 is negative"):
        simulate(schedule, Cost(latency=-1))
    stuck = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", name="stuck")
    with pytest.raises(ScheduleError, match="schedule stuck: it deadlocks"):
        simulate(stuck)
