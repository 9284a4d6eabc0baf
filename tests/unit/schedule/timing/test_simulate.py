"""The simulator against closed forms, exactly."""

from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule import wavefront
from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import build, forward_only, gpipe_on
from megapipe.schedule.ir import Kind
from megapipe.schedule.placement import loop, mirrored, replicated, vee
from megapipe.schedule.timing.idle import Idle, idle, typical_latency
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import WALKS, counted_rounds, of, schedules
from tests.unit.schedule.timing.cost_strategies import POLICIES, costs
from tests.unit.schedule.timing.longest_paths import Clocks

times = st.fractions(min_value=Fraction(1, 7), max_value=5, max_denominator=7)
sizes = st.integers(1, 7), st.integers(1, 16)


@given(*sizes, times, times, times, st.sampled_from(["gpipe", "1f1b"]))
def test_gpipe_and_1f1b_have_p_minus_1_idle_slots(p, m, f, i, w, name):
    timeline = simulate(build(name, ranks=p, microbatches=m), Cost(f, i, w))
    assert timeline.makespan == (m + p - 1) * (f + i + w)
    assert timeline.bubble_makespan == Fraction(p - 1, m + p - 1)
    assert timeline.bubble_ideal == Fraction(p - 1, m)


@given(*sizes, times, times, times)
def test_zb_h1(p, m, f, i, w):
    w = min(f, i, w)
    timeline = simulate(build("zb_h1", ranks=p, microbatches=m), Cost(f, i, w))
    if m >= p:
        assert timeline.makespan == m * (f + i + w) + (p - 1) * (f + i - w)
    equal = simulate(build("zb_h1", ranks=p, microbatches=m), Cost(f, f, f))
    if m <= p:
        assert equal.makespan == ((m + p - 1) * 2 + 1) * f


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), times, times)
def test_interleaved_divides_the_bubble_by_the_chunks(p, groups, v, f, b):
    m = groups * p
    schedule = build("interleaved_1f1b", ranks=p, microbatches=m, chunks=v)
    timeline = simulate(schedule, Cost(F=f / v, B=b / v))
    assert timeline.makespan == m * (f + b) + (p - 1) * (f + b) / v
    assert timeline.bubble_ideal == Fraction(p - 1, v * m)
    assert timeline.bubble_makespan == Fraction(p - 1, v * m + p - 1)


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
        "interleaved_1f1b",
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        microbatch_group_size=group,
    )
    assert simulate(schedule).makespan == makespan


def test_forward_only_on_a_v_leaves_no_gap_once_it_runs():
    timeline = simulate(forward_only(vee(4), 6))
    assert timeline.makespan == 6 * 2 + 8 - 2
    assert timeline.spans[3] == timeline.busy[3] == 12


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 30))
def test_forward_only_on_a_loop_is_within_a_few_slots_of_the_shortest(p, v, m):
    makespan = simulate(forward_only(loop(p, v), m)).makespan
    assert makespan == m + p - 1 if v == 1 else makespan <= m * v + (p - 1) * v


def test_times_of_two_ranks_with_latency():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(2, 3, 4, latency=10))
    assert list(map(list, timeline.starts)) == [[0, 2, 31, 40], [12, 14, 21, 23]]
    assert list(timeline.ends[0]) == [2, 4, 38, 47]


def test_hand_over_within_a_rank_is_free():
    local = simulate(gpipe_on(loop(1, 2), 1), Cost(latency=100))
    assert local.makespan == 6
    crossing = simulate(gpipe_on(loop(2), 1), Cost(latency=100))
    assert crossing.makespan == 206


def test_costs_per_stage():
    cost = Cost(F=(1, 5), I=(1, 2), W=(3, 4))
    timeline = simulate(build("gpipe", ranks=2, microbatches=1), cost)
    assert list(map(list, timeline.starts)) == [[0, 12], [1, 6]]
    assert list(map(list, timeline.ends)) == [[1, 16], [6, 12]]
    assert timeline.busy == (5, 11)
    assert timeline.spans == (16, 11)
    assert timeline.bubble_makespan == 1 - Fraction(16, 32)
    assert timeline.bubble_ideal == 1
    assert timeline.bubble_span == Fraction(1, 2)


def test_a_span_may_be_shorter_than_the_makespan():
    """Two forwards more in the warm-up (ZB-H2): no rank idles within its own span."""
    text = (
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3/"
        "1F0 1I0 1F1 1I1 1F2 1I2 1F3 1I3 1W0 1W1 1W2 1W3"
    )
    timeline = simulate(of(text, 4))
    assert timeline.makespan == 13
    assert timeline.spans == (12, 12)
    assert timeline.bubble_span == 0
    assert timeline.bubble_makespan == Fraction(1, 13)


def times_of(timeline):
    return [
        list(zip(*both, strict=True)) for both in zip(timeline.starts, timeline.ends, strict=True)
    ]


def test_joined_operations_start_together_and_end_together():
    schedule = of("0F0 0F1 0B0 0B1/1F0 1F1+1B0 1B1", 2)
    cost = Cost(F=2, B=3, overlap_factor=Fraction(4, 5))
    timeline = simulate(schedule, cost)
    assert times_of(timeline) == [
        [(0, 2), (2, 4), (8, 11), (11, 14)],
        [(2, 4), (4, 8), (4, 8), (8, 11)],
    ]
    assert timeline.busy == (10, 9)
    assert timeline.makespan == 14


def test_slices_take_their_shares():
    schedule = of("0F0 0F0.1 0B0.1 0B0/1F0 1F0.1 1B0.1 1B0", slices=2)
    equal = simulate(schedule, Cost(F=2, B=4))
    assert times_of(equal)[0] == [(0, 1), (1, 2), (5, 7), (7, 9)]
    shares = simulate(schedule, Cost(F=3, B=6, slices=(Fraction(1, 3), Fraction(2, 3))))
    assert times_of(shares)[0] == [(0, 1), (1, 3), (9, 13), (13, 15)]
    assert times_of(shares)[1] == [(1, 2), (3, 5), (5, 9), (9, 11)]


def test_parts_take_their_shares():
    halves = (Fraction(1, 2),) * 2
    timeline = simulate(of("0F0 0F1 0B0 0B1", 2, sizes=halves), Cost(F=1, B=4))
    assert times_of(timeline) == [[(0, Fraction(1, 2)), (Fraction(1, 2), 1), (1, 3), (3, 5)]]


def test_recomputation_costs_once_ahead_or_late():
    cost = Cost(F=2, B=3, R=5)
    zero = frozenset({0})
    assert times_of(simulate(of("0F0 0F1 0R0 0B0 0B1", 2, recompute=zero), cost)) == [
        [(0, 2), (2, 4), (4, 9), (9, 12), (12, 20)]
    ]
    joined = of("0F0 0R0+0F1 0B0 0B1", 2, recompute=zero)
    assert times_of(simulate(joined, cost)) == [[(0, 2), (2, 9), (2, 9), (9, 12), (12, 20)]]
    assert simulate(of("0F0 0I0 0W0", recompute=zero), Cost(2, 3, 4)).makespan == 2 + (3 + 2) + 4
    assert simulate(of("0F0 0I0 0W0"), Cost(2, 3, 4, R=9)).makespan == 9


def test_two_replicas_run_towards_each_other():
    schedule = of("0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1", 2, mirrored(loop(2)), direction=(0, 1))
    assert simulate(schedule, Cost(F=1, B=2)).makespan == 6
    assert simulate(schedule, Cost(F=(1, 2), B=(3, 5))).makespan == 11


def test_links():
    schedule = build("gpipe", ranks=2, microbatches=1)
    there = Cost(latency={(0, 1): 5})
    assert simulate(schedule, there).makespan == 6 + 5
    wide = Cost(latency=1, bandwidth={(0, 1): 4, (1, 0): 2}, message=8)
    assert simulate(schedule, wide).makespan == 6 + (1 + 2) + (1 + 4)
    part = simulate(of("0F0/1F0", sizes=(Fraction(1, 2),), forward_only=True), wide)
    assert part.makespan == Fraction(1, 2) + (1 + 1) + Fraction(1, 2)


def test_messages_that_do_not_overlap_hold_the_sender():
    schedule = forward_only(loop(2), 2)
    assert times_of(simulate(schedule, Cost(latency=3))) == [[(0, 1), (1, 2)], [(4, 5), (5, 6)]]
    assert times_of(simulate(schedule, Cost(latency=3, overlap=False))) == [
        [(0, 1), (4, 5)],
        [(4, 5), (8, 9)],
    ]


def test_jitter_is_drawn_for_each_operation_and_repeatable():
    schedule = build("1f1b", ranks=2, microbatches=8)
    once, again, other = (simulate(schedule, Cost(jitter=0.3, seed=seed)) for seed in (1, 1, 2))
    assert times_of(once) == times_of(again) != times_of(other)
    lengths = [end - start for start, end in times_of(once)[0]]
    assert len(set(lengths)) == 16
    for op, length in zip(schedule.rank_ops(0), lengths, strict=True):
        assert abs(length / (1 if op.kind == Kind.F else 2) - 1) <= 0.3


def test_costs_for_a_full_rank_are_shared_by_its_stages():
    cost = Cost.full_rank(vee(3), F=3, I=4, W=1, R=2, latency=5, reduce=6, gather=1)
    half = Fraction(1, 2)
    assert cost == Cost(3 * half, 2, half, R=1, latency=5, reduce=3, gather=half)
    assert type(cost.I) is int
    assert Cost.full_rank(loop(4), F=3, B=7) == Cost(F=3, B=7)
    assert Cost.full_rank(vee(2), F=0.5) == Cost(F=0.25, I=Fraction(1, 2), W=Fraction(1, 2))


def test_what_is_joined_is_busy_once():
    """The first operation of all is the only one that is joined."""
    timeline = simulate(of("0F0+0F1 0B0 0B1", 2), Cost(F=2, B=3))
    assert list(timeline.ends[0]) == [4, 4, 7, 10]
    assert timeline.busy == (10,)


@in_parts("walk", WALKS, full=["some rounds, then a loop", "rounds of all ranks"])
@settings(max_examples=100)
@given(schedules(), st.data())
def test_every_start_is_the_longest_path_to_it(walk, schedule, data):
    cost, policy = data.draw(costs(schedule)), data.draw(POLICIES)
    with mock.patch.multiple(wavefront, **WALKS[walk]):
        timeline = simulate(schedule, cost, policy)
    clocks = Clocks(schedule, cost, policy)
    expected = clocks.times
    assert times_of(timeline) == expected
    assert sorted(timeline.gathers) == sorted(clocks.gathers)
    assert sorted(timeline.reductions) == sorted(clocks.reductions)
    for rank, ops in enumerate(map(schedule.rank_ops, range(len(expected)))):
        own = [
            end - start
            for op, (start, end) in zip(ops, expected[rank], strict=True)
            if not op.joined
        ]
        assert timeline.busy[rank] == sum(own)
    for rank, each in enumerate(idle(timeline)):
        assert sum(each) == timeline.makespan - timeline.busy[rank]
        assert min(each) >= 0


@pytest.mark.parametrize("ranks", [31, 32])
@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b", "naive"])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_many_ranks_abreast_have_the_times_of_the_loop(name, ranks, jitter):
    """To the bit, in floats too; a schedule whose ranks wait for each other is left to the loop."""
    schedule = build(name, ranks=ranks, microbatches=40)
    cost = Cost(F=0.1, I=0.37, W=1 / 3, latency=0.05, jitter=jitter)
    with counted_rounds() as counts:
        timeline = simulate(schedule, cost)
    ran = 0 if ranks < 32 else sum(map(len, schedule.ops))
    if name == "naive":
        assert sum(counts) < ran / 10 or not ran
    else:
        assert sum(counts) == ran
    with mock.patch.object(wavefront, "RANKS", 100):
        looped = simulate(schedule, cost)
    assert times_of(timeline) == times_of(looped)
    assert {type(time) for time in (*timeline.starts[0], *timeline.busy)} == {float}


def test_idle_time_by_cause():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(2, 3, 4, latency=10))
    assert timeline.makespan == 47
    assert idle(timeline) == (
        Idle(warmup=27, waiting=0, drain=2, imbalance=0),
        Idle(warmup=12, waiting=0, drain=17, imbalance=0),
    )
    timeline = simulate(forward_only(loop(2), 3), Cost(F=(3, 1), latency=1))
    assert idle(timeline) == (
        Idle(warmup=0, waiting=0, drain=2, imbalance=0),
        Idle(warmup=4, waiting=2, drain=0, imbalance=2),
    )


def test_floats_give_floats():
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), Cost(0.5, 0.5, 0.5))
    assert timeline.bubble_makespan == pytest.approx(1 / 3)


def test_errors():
    schedule = build("1f1b", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="cost W: 3 times for 2 stages"):
        simulate(schedule, Cost(W=(1, 2, 3)))
    with pytest.raises(ScheduleError, match="cost F: -1 is negative"):
        simulate(schedule, Cost(F=(1, -1)))
    with pytest.raises(ScheduleError, match="cost reduce: 1 times for 2 stages; give one per"):
        simulate(schedule, Cost(reduce=(1,)))
    with pytest.raises(ScheduleError, match="cost gather: -1 is negative"):
        simulate(schedule, Cost(gather=-1))
    with pytest.raises(ScheduleError, match="replicas: zero 4 is not 0, 1, 2 or 3"):
        simulate(schedule, Cost(), ReplicaPolicy(4))
    with pytest.raises(ScheduleError, match="replicas: prefetch -1 is negative"):
        simulate(schedule, Cost(), ReplicaPolicy(1, -1))
    with pytest.raises(ScheduleError, match="cost latency: -1 is negative"):
        simulate(schedule, Cost(latency=-1))
    with pytest.raises(ScheduleError, match="cost latency: -1 is negative"):
        simulate(schedule, Cost(latency={(1, 0): -1}))
    with pytest.raises(ScheduleError, match="cost bandwidth: 0 from rank 1 to 0 is not above 0"):
        simulate(schedule, Cost(bandwidth=0))
    with pytest.raises(ScheduleError, match="cost slices: 2 shares for 1 slices"):
        simulate(schedule, Cost(slices=(1, 1)))
    stuck = of("0F0 0B0 0F1 0B1/1F1 1B1 1F0 1B0", 2)
    with pytest.raises(ScheduleError, match="schedule x: it deadlocks"):
        simulate(stuck)


def test_a_rank_without_operations_is_idle_throughout():
    schedule = of("0F0 0B0/", placement=replicated([2]), direction=(0,))
    timeline = simulate(schedule, Cost(F=1, B=2))
    assert timeline.spans == timeline.busy == (3, 0)
    assert idle(timeline) == (Idle(0, 0, 0, 0), Idle(0, 0, 3, 0))
    assert (timeline.bubble_makespan, timeline.bubble_span) == (Fraction(1, 2), Fraction(1, 2))
    assert timeline.bubble_ideal == 1


def test_a_timeline_that_was_measured_may_begin_at_any_time():
    timeline = simulate(build("1f1b", ranks=3, microbatches=5), Cost(F=2, B=3, latency=1))
    columns = (timeline.start_ticks, timeline.end_ticks)
    starts, ends = (tuple([tick + 7 for tick in own] for own in column) for column in columns)
    later = replace(timeline, start_ticks=starts, end_ticks=ends)
    assert timeline.starts is timeline.start_ticks, "whole numbers are in the unit of the costs"
    assert (timeline.begin, later.begin) == (0, 7)
    assert later.makespan == timeline.makespan
    assert (later.exposed_gather, later.exposed_reduce) == (0, 0)
    assert (later.spans, later.busy) == (timeline.spans, timeline.busy)
    assert later.bubble_makespan == timeline.bubble_makespan
    assert idle(later) == idle(timeline)


def test_the_latency_that_operations_wait_for():
    schedule = build("1f1b", ranks=4, microbatches=8)
    assert typical_latency(simulate(schedule, Cost(latency=3))) == 3
    assert typical_latency(simulate(schedule)) == 0
    assert typical_latency(simulate(build("1f1b", ranks=1, microbatches=2), Cost(latency=3))) == 0
