"""Gathers and reductions over data-parallel peers in the simulator."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, GradBucket
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import build, forward_only
from megapipe.schedule.ir import Kind
from megapipe.schedule.placement import Placement, loop, mirrored
from megapipe.schedule.search import search
from megapipe.schedule.shared_reductions import shared_reductions
from megapipe.schedule.timing.data_parallel import Interval
from megapipe.schedule.timing.idle import idle
from megapipe.schedule.timing.opportunistic import deviate
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.schedule_cases import of, schedules
from tests.unit.schedule.timing.cost_strategies import costs

times = st.fractions(min_value=Fraction(1, 7), max_value=5, max_denominator=7)


def timed(name, p, m, v=1, **full_rank):
    schedule = build(name, ranks=p, microbatches=m, chunks=v)
    return simulate(schedule, Cost.full_rank(schedule.placement, **full_rank))


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 4), times, times, times, times)
def test_breadth_first_hides_all_but_one_chunk(p, more, v, f, b, r, g):
    """A chunk's reduction has the next chunk's backwards to hide behind, and the gather of the
    next chunk the forwards of this one: m of them, each a v-th of a full rank's."""
    m = p + more
    r, g = m * r, m * g
    timeline = timed("breadth_first", p, m, v, F=f, B=b, reduce=r, gather=g)
    computed = m * (f + b) + (p - 1) * (f + b) / v
    reduced = r / v + (v - 1) * max(0, (r - m * b) / v)
    gathered = g / v + (v - 1) * max(0, (g - m * f) / v)
    assert timeline.makespan == computed + reduced + gathered
    assert timeline.exposed_reduce == reduced
    assert timeline.exposed_gather == g / v
    assert type(timeline.makespan) in (int, Fraction)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 4), times, times, times)
def test_depth_first_has_only_p_backwards_to_hide_behind(p, groups, v, f, b, r):
    m = groups * p
    timeline = timed("interleaved_1f1b", p, m, v, F=f, B=b, reduce=r * m)
    assert timeline.exposed_reduce == r * m / v + (v - 1) * max(0, (r * m - p * b) / v)
    assert timeline.makespan == m * (f + b) + (p - 1) * (f + b) / v + timeline.exposed_reduce


def test_depth_first_exposes_more_than_breadth_first():
    exposed = {
        name: timed(name, 4, 16, 4, F=1, B=2, reduce=24).exposed_reduce
        for name in ("breadth_first", "interleaved_1f1b")
    }
    assert exposed == {"breadth_first": 6, "interleaved_1f1b": 6 + 3 * (6 - 2)}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1"])
def test_one_chunk_hides_nothing(name):
    plain, both = timed(name, 4, 8), timed(name, 4, 8, reduce=5, gather=2)
    assert (both.exposed_gather, both.exposed_reduce) == (2, 5)
    assert both.makespan == plain.makespan + 7
    assert sorted(both.reductions) == [
        Interval(rank, rank, ends[-1], ends[-1] + 5) for rank, ends in enumerate(both.ends)
    ]


def test_spans_are_of_computation_and_the_makespan_of_all():
    plain, both = timed("1f1b", 2, 3), timed("1f1b", 2, 3, reduce=5, gather=2)
    assert both.spans == plain.spans
    assert both.bubble_span == plain.bubble_span
    assert both.bubble_makespan == 1 - Fraction(9, 12 + 7)
    assert both.bubble_ideal == Fraction(19 - 9, 9)
    assert [each.warmup for each in idle(both)] == [2 + 2, 2 + 1]
    assert [each.drain for each in idle(both)] == [1 + 5, 2 + 5]


def test_an_operation_that_is_late_for_its_parameters_waits():
    """Rank 0 gathers stage 0 until 4 and stage 2 until 8; F of stage 2 could begin at 6."""
    schedule = of("0F0 2F0 2B0 0B0/1F0 1B0", 1, Placement(2, ((0, 1, 0),)))
    timeline = simulate(schedule, Cost(gather=(4, 1, 4)))
    assert timeline.gathers == (Interval(0, 0, 0, 4), Interval(2, 0, 4, 8), Interval(1, 1, 0, 1))
    assert list(timeline.starts[0]) == [4, 8, 9, 13]
    assert list(timeline.starts[1]) == [5, 11]


def test_one_of_a_joined_pair_holds_up_both():
    schedule = of("0F0 0F1 0B0 0B1/1F0 1F1+1B0 1B1", 2)
    free = simulate(schedule, Cost(F=2, B=3))
    assert [list(times) for times in simulate(schedule, Cost(F=2, B=3, gather=(0, 1))).starts] == [
        list(times) for times in free.starts
    ]
    pair = of("0F0 1F0+0F1 1B0 0B0 1F1 1B1 0B1", 2, loop(1, 2))
    timeline = simulate(pair, Cost(gather=(1, 9)))
    assert list(timeline.starts[0][:4]) == [1, 10, 10, 12]


def test_all_holders_of_a_stage_reduce_together_when_the_last_is_through():
    schedule = of("0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1", 2, mirrored(loop(2)), direction=(0, 1))
    timeline = simulate(schedule, Cost(F=1, B=2, reduce=(5, 7)))
    assert [list(ends) for ends in timeline.ends] == [[1, 2, 4, 6]] * 2
    assert timeline.reductions == (
        *(Interval(1, rank, 4, 11) for rank in (0, 1)),
        *(Interval(0, rank, 11, 16) for rank in (0, 1)),
    )
    late = simulate(schedule, Cost(F=1, B=(2, 4), latency={(0, 1): 3}, reduce=(0, 1)))
    last = max(ends[2] for ends in late.ends)
    assert late.reductions == tuple(Interval(1, rank, last, last + 1) for rank in (0, 1))


def lazily(schedule, cost):
    """Return when all is over if what several ranks hold is reduced after all operations."""
    placement, alone = schedule.placement, simulate(schedule, cost.without_replicas())
    free = [ends[-1] for ends in alone.ends]
    for stage in range(placement.stages):
        holders = placement.holders(stage)
        end = max(free[rank] for rank in holders) + cost.reduce
        for rank in holders:
            free[rank] = end
    return max(free)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("chimera", {}),
        ("chimera_backward_halving", {}),
        ("gems", {}),
        ("bitpipe", {"chunks": 2}),
        ("dualpipe", {}),
    ],
)
@pytest.mark.parametrize("reduce", [1, 3, 8])
def test_eager_is_sooner_than_lazy(name, options, reduce):
    schedule = build(name, ranks=4, microbatches=8, **options)
    cost = Cost(F=1, B=2, I=1, W=1, reduce=reduce)
    assert simulate(schedule, cost).makespan < lazily(schedule, cost)


def test_a_holder_that_computes_nothing_takes_part():
    """One micro-batch runs through one direction alone."""
    timeline = simulate(build("chimera", ranks=2, microbatches=1), Cost(reduce=3))
    assert {(each.stage, each.rank) for each in timeline.reductions} == {
        (stage, rank) for stage in (0, 1) for rank in (0, 1)
    }


HALVES = ((GradBucket(Fraction(1, 2), Fraction(3, 4)), GradBucket(1, Fraction(1, 4))),)


def test_pieces_leave_within_the_last_operation_that_adds_to_them():
    """B1 is from 8 to 12: three quarters of the reduction begin at 10, the rest follows them."""
    schedule = build("1f1b", ranks=1, microbatches=2)
    timeline = simulate(schedule, Cost(F=2, B=4, reduce=4, buckets=HALVES))
    assert timeline.reductions == (Interval(0, 0, 10, 13), Interval(0, 0, 13, 14))
    assert timeline.makespan == 14
    assert simulate(schedule, Cost(F=2, B=4, reduce=4)).makespan == 16
    split = simulate(of("0F0 0I0 0F1 0I1 0W0 0W1", 2), Cost(W=2, reduce=4, buckets=HALVES))
    assert [(each.start, each.end) for each in split.reductions] == [(7, 10), (10, 11)]


@pytest.mark.parametrize(
    "buckets",
    [
        ((),),
        ((GradBucket(1, Fraction(1, 2)),),),
        ((GradBucket(1, Fraction(1, 2)), GradBucket(Fraction(1, 2), Fraction(1, 2))),),
        ((GradBucket(0, Fraction(1, 2)), GradBucket(Fraction(1, 2), Fraction(1, 2))),),
        ((GradBucket(1, 1),),) * 2,
    ],
)
def test_pieces_that_make_no_sense_are_refused(buckets):
    schedule = build("1f1b", ranks=1, microbatches=1)
    with pytest.raises(ScheduleError, match="cost buckets"):
        simulate(schedule, Cost(reduce=1, buckets=buckets))


def test_validation_has_nothing_to_reduce():
    timeline = simulate(forward_only(loop(2), 3), Cost(reduce=5, gather=1))
    assert timeline.reductions == ()
    assert timeline.makespan == 1 + 4


@pytest.mark.full
@settings(max_examples=100)
@given(schedules(), st.data())
def test_reductions_are_as_early_as_their_lane_allows(schedule, data):
    cost = replace(data.draw(costs(schedule)), buckets=())
    timeline = simulate(schedule, cost, ReplicaPolicy(data.draw(st.integers(0, 1))))
    stages = schedule.placement.stages
    length = cost.reduce if isinstance(cost.reduce, tuple) else (cost.reduce,) * stages
    ready = {}
    for rank in range(schedule.placement.ranks):
        ops = zip(schedule.rank_ops(rank), timeline.ends[rank], strict=True)
        for op, end in ops:
            if op.kind in (Kind.B, Kind.W):
                ready[op.stage] = max(end, ready.get(op.stage, 0))
    for rank, shared in enumerate(shared_reductions(schedule)):
        for done, stage in shared:
            come = timeline.ends[rank][done - 1] if done else 0
            ready[stage] = max(come, ready[stage])
    expected = {(s, r) for s in ready if length[s] for r in schedule.placement.holders(s)}
    assert sorted((each.stage, each.rank) for each in timeline.reductions) == sorted(expected)
    lanes = [
        [each for each in (*timeline.gathers, *timeline.reductions) if each.rank == rank]
        for rank in range(schedule.placement.ranks)
    ]
    for lane in lanes:
        assert all(a.end <= b.start for a, b in pairwise(lane))
    for each in timeline.reductions:
        assert each.end - each.start == length[each.stage]
        busy = {
            other.end
            for rank in schedule.placement.holders(each.stage)
            for other in lanes[rank]
            if other.end <= each.start
        }
        assert each.start == max([ready[each.stage], *busy])
        starts = {o.start for o in timeline.reductions if o.stage == each.stage}
        assert starts == {each.start}
    assert timeline.time(timeline.finish_ticks) == max(
        *(ends[-1] for ends in timeline.ends if ends), 0, *(o.end for o in timeline.reductions)
    )


@pytest.mark.parametrize("name", ["1f1b", "chimera", "zb_v"])
def test_deviation_gathers_and_reduces_too(name):
    schedule = build(name, ranks=4, microbatches=8)
    cost = Cost(latency=1, reduce=9, gather=4)
    deviated, static = deviate(schedule, cost, window=1), simulate(schedule, cost)
    assert list(map(list, deviated.starts)) == list(map(list, static.starts))
    assert deviated.gathers == static.gathers
    assert deviated.reductions == static.reductions


def test_search_compares_with_reductions():
    """Values are those of the simulator, fractions and all."""
    cost = Cost(Fraction(3, 7), 1, 1, reduce=Fraction(17, 3), gather=Fraction(1, 2))
    found = search(2, 4, cost_of=lambda _: cost, placements=["loop"], evaluations=50)
    assert found.value == simulate(found.schedule, cost).makespan
    for name in ("breadth_first", "interleaved_1f1b"):
        assert found.value <= simulate(build(name, ranks=2, microbatches=4), cost).makespan
