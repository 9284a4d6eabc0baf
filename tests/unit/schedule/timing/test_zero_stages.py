"""The simulator under every ZeRO stage; what is known by hand, and what holds for all schedules."""

from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import ReplicaPolicy, with_zero_actions
from megapipe.schedule.generators import build, forward_only, names
from megapipe.schedule.ir import Kind
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, loop, mirrored
from megapipe.schedule.program import ActionKind
from megapipe.schedule.search import search
from megapipe.schedule.timing.data_parallel import Interval
from megapipe.schedule.timing.idle import idle
from megapipe.schedule.timing.opportunistic import deviate
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_cases import all_small, of

DEPTH_FIRST = "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"


def spans(intervals):
    return [(each.stage, each.start, each.end) for each in intervals]


def timed(text, microbatches=1, placement=None, **given):
    """Simulate a schedule; `given` has costs and fields of the policy."""
    policy = {what: given.pop(what) for what in ReplicaPolicy._fields if what in given}
    cost = Cost(**{"F": 1, "B": 2} | given)
    return simulate(of(text, microbatches, placement), cost, ReplicaPolicy(**policy))


def test_one_stage_is_gathered_and_reduced_once():
    timeline = timed("0F0 0B0", gather=3, reduce=4, zero=3, prefetch=0)
    assert spans(timeline.gathers) == [(0, 0, 3)]
    assert list(timeline.starts[0]) == [3, 4]
    assert spans(timeline.reductions) == [(0, 6, 10)]


def test_without_prefetch_gathers_wait_for_the_operation_before_and_behind_reductions():
    timeline = timed("0F0 1F0 1B0 0B0", gather=3, reduce=5, zero=3, prefetch=0)
    assert spans(timeline.gathers) == [(0, 0, 3), (1, 4, 7), (0, 15, 18)]
    assert list(timeline.starts[0]) == [3, 7, 8, 18]
    assert spans(timeline.reductions) == [(1, 10, 15), (0, 20, 25)]


def test_with_prefetch_the_next_is_on_its_way():
    timeline = timed("0F0 1F0 1B0 0B0", gather=3, reduce=5, zero=3, prefetch=1)
    assert spans(timeline.gathers) == [(0, 0, 3), (1, 3, 6)]
    assert list(timeline.starts[0]) == [3, 6, 7, 9]
    assert spans(timeline.reductions) == [(1, 9, 14), (0, 14, 19)]


def test_gradients_wait_for_all_reductions_but_the_last_also_behind_a_joined_pair():
    """Both of the pair have memory before either is reduced, so stage 3's is let go only then."""
    text = "0F0 1F0 2F0 3F0 3I0 2I0 1I0 0I0 3W0 2W0+1W0 0W0"
    timeline = timed(text, placement=loop(1, 4), I=1, W=1, reduce=(0, 0, 0, 10), zero=2)
    assert spans(timeline.reductions) == [(3, 9, 19)]
    assert list(timeline.starts[0])[-4:] == [8, 9, 9, 19]


def test_gathers_begin_while_the_rank_waits_for_a_message():
    """Rank 0 has nothing to do from 4 to 12, and gathers stage 2 from 4 to 6."""
    two = Placement(2, ((0, 1, 0),))
    timeline = timed(
        "0F0 2F0 2B0 0B0/1F0 1B0", 1, two, F=2, latency=3, gather=2, zero=3, prefetch=0
    )
    assert spans(timeline.gathers)[:2] == [(0, 0, 2), (2, 4, 6)]
    assert list(timeline.starts[0])[:3] == [2, 12, 14]


def test_runs_are_reduced_one_after_the_other_and_hold_the_rank_up():
    """A third stage's gradients would need memory; a stage's own next run its own."""
    timeline = timed(DEPTH_FIRST, 2, reduce=5, zero=2)
    assert list(timeline.starts[0]) == [0, 1, 2, 3, 4, 6, 11, 16]
    assert spans(timeline.reductions) == [(1, 6, 11), (0, 11, 16), (1, 16, 21), (0, 21, 26)]
    assert timeline.makespan == 26
    assert timeline.exposed_reduce == 26 - 18
    assert timed(DEPTH_FIRST, 2, reduce=5, zero=1).makespan == 20
    assert timed(DEPTH_FIRST, 2, reduce=2, zero=2).makespan == 12 + 2
    (each,) = idle(timeline)
    assert (each.warmup, each.waiting, each.drain) == (0, 0, 3 + 3 + 8)


def test_new_gradients_of_a_stage_wait_for_its_own_reduction():
    text = "0F0 1F0 0F1 1F1 1I0 0I0 1I1 0I1 1W0 0W0 0W1 1W1"
    timeline = timed(text, 2, reduce=(0, 9), zero=2)
    assert spans(timeline.reductions) == [(1, 9, 18), (1, 19, 28)]
    assert list(timeline.starts[0])[-4:] == [8, 9, 10, 18]


def test_a_reduction_that_takes_no_time_is_one_of_two():
    """Stage 2's is waited for before the run after stage 1's."""
    text = "0F0 1F0 2F0 2B0 1B0 0B0"
    for middle in (0, 1):
        timeline = timed(text, reduce=(1, middle, 20), zero=2)
        assert list(timeline.starts[0]) == [0, 1, 2, 3, 5, 25]


def test_a_message_does_not_wait_for_a_reduction():
    """1B0 ends at 10, while its rank reduces stage 3 until 16."""
    timeline = timed("0F0 2F0 2B0 0B0/1F0 3F0 3B0 1B0", 1, loop(2, 2), reduce=10, zero=2)
    assert list(timeline.starts[0]) == [0, 2, 6, 10]
    assert list(timeline.ends[1]) == [2, 4, 6, 10]
    assert [each for each in timeline.reductions if each.rank == 1] == [
        Interval(3, 1, 6, 16),
        Interval(1, 1, 16, 26),
    ]


def test_a_chunked_loss_adds_gradients_within_the_input_gradient():
    text = "0F0 1F0 1I0 0I0 0W0 1W0"
    plain = timed(text, reduce=1, zero=2)
    chunked = timed(text, reduce=1, zero=2, chunked_loss=True)
    assert spans(plain.reductions) == [(0, 5, 6), (1, 6, 7)]
    assert spans(chunked.reductions) == [(1, 3, 4), (0, 5, 6), (1, 6, 7)]


def test_stages_with_several_holders_are_gathered_by_each_and_reduced_by_all():
    schedule = of("0F0 1F1 1B1 0B0/0F1 1F0 1B0 0B1", 2, mirrored(loop(2)), direction=(0, 1))
    timeline = simulate(schedule, Cost(F=1, B=2, gather=1, reduce=5), ReplicaPolicy(3, 0))
    assert [list(starts) for starts in timeline.starts] == [[1, 3, 4, 12]] * 2
    assert spans(timeline.gathers) == [(0, 0, 1), (1, 2, 3), (0, 11, 12)] * 2
    assert spans(timeline.reductions) == [(1, 6, 11)] * 2 + [(0, 14, 19)] * 2


def test_breadth_first_reduces_and_gathers_least():
    """A chunk once per direction; depth-first goes back and forth, and needs a gather for each run
    of one chunk's operations."""
    counts, runs = {}, {}
    for name in ("breadth_first", "interleaved_1f1b"):
        schedule = build(name, ranks=2, microbatches=8, chunks=2)
        cost = Cost.full_rank(schedule.placement, gather=4, reduce=4)
        steps = [simulate(schedule, cost, ReplicaPolicy(z, 0)) for z in (1, 2, 3)]
        counts[name] = [(len(each.gathers), len(each.reductions)) for each in steps]
        assert steps[0].makespan <= steps[1].makespan <= steps[2].makespan
        runs[name] = sum(
            1 for ops in map(schedule.rank_ops, (0, 1)) for _ in groupby(op.stage for op in ops)
        )
    assert counts["breadth_first"] == [(4, 4), (4, 4), (2 * 3, 4)]
    assert counts["interleaved_1f1b"] == [(4, 4), (4, 2 * 2 * 4), (32, 2 * 2 * 4)]
    assert runs == {"breadth_first": 6, "interleaved_1f1b": 32}


def cases():
    """Yield every registered schedule at the largest of some small sizes, and a validation."""
    yield forward_only(loop(2, 2), 3)
    for name in names():
        largest = {}
        for schedule in all_small(name, ranks=4, microbatches=3):
            largest[len(schedule.placement.table), schedule.placement.stages] = schedule
        yield from largest.values()


@pytest.fixture(scope="module")
def schedules():
    return list(cases())


def actions_of(schedule, policy):
    """Count actions by (what, stage, rank) in the programs that the executor runs."""
    return Counter(
        (action.do, action.stage, program.rank)
        for program in with_zero_actions(
            lower(schedule),
            schedule,
            policy,
        )
        for action in program.actions
    )


@in_parts(
    ("zero", "prefetch"),
    [(0, 1), (1, 1), (2, 1), (3, 0), (3, 1), (3, 2)],
    default=[(3, 1)],
    full=[(2, 1), (3, 2)],
)
def test_every_schedule(schedules, zero, prefetch):
    """There is an interval for each action; those of a rank are apart; weights are there in time;
    and what costs more takes no less."""
    cost = Cost(F=3, I=4, W=3, latency=1, gather=5, reduce=7)
    policy = ReplicaPolicy(zero, prefetch)
    for schedule in schedules:
        timeline, placement = simulate(schedule, cost, policy), schedule.placement
        actions = actions_of(schedule, policy)
        begin = ActionKind.UNSHARD if zero == 3 else ActionKind.WAIT_WEIGHTS
        gathers = Counter((each.stage, each.rank) for each in timeline.gathers)
        assert gathers == {k[1:]: n for k, n in actions.items() if k[0] == begin}
        reductions = Counter((each.stage, each.rank) for each in timeline.reductions)
        assert reductions == {k[1:]: n for k, n in actions.items() if k[0] == ActionKind.REDUCE}
        shared = [s for s in range(placement.stages) if len(placement.holders(s)) > 1]
        if not schedule.forward_only:
            assert all(reductions[s, rank] == 1 for s in shared for rank in placement.holders(s))
        for rank in range(placement.ranks):
            both = (*timeline.gathers, *timeline.reductions)
            lane = sorted((each.start, each.end) for each in both if each.rank == rank)
            assert all(a <= b for (_, a), (b, _) in pairwise(lane))
            ops = zip(schedule.rank_ops(rank), timeline.starts[rank], strict=True)
            ends = {}
            for each in timeline.gathers:
                if each.rank == rank:
                    ends.setdefault(each.stage, []).append(each.end)
            assert all(ends[op.stage][0] <= start for op, start in ops if op.kind != Kind.W)
        alone = simulate(schedule, cost.without_replicas(), policy)
        assert alone.gathers == alone.reductions == ()
        for more in ({"gather": 6}, {"reduce": 9}, {"gather": 11, "reduce": 30}):
            dearer = simulate(schedule, replace(cost, **more), policy)
            assert dearer.makespan >= timeline.makespan
        assert timeline.makespan >= alone.makespan + 5
        for each in idle(timeline):
            assert min(each) >= 0


def test_zero_0_is_simulated_as_zero_1(schedules):
    """One all-reduce, or a reduce-scatter now and an all-gather later: what differs is the time."""
    for schedule in schedules:
        cost = Cost(gather=2, reduce=3)
        first, second = (simulate(schedule, cost, ReplicaPolicy(z)) for z in (0, 1))
        assert (first.start_ticks, first.gathers, first.reductions) == (
            *(second.start_ticks, second.gathers),
            second.reductions,
        )


def test_a_timeline_without_costs_is_the_same_at_every_stage(schedules):
    for schedule in schedules:
        plain = simulate(schedule, Cost(F=2, latency=1))
        for zero in (2, 3):
            other = simulate(schedule, Cost(F=2, latency=1), ReplicaPolicy(zero))
            assert other.start_ticks == plain.start_ticks


def test_deviation_has_no_order_to_reduce_by():
    schedule = build("1f1b", ranks=2, microbatches=4)
    with pytest.raises(ScheduleError, match="ZeRO-2 gathers and reduces between operations"):
        deviate(schedule, Cost(reduce=1), 2, ReplicaPolicy(2))
    plain = deviate(schedule, Cost(), 2, ReplicaPolicy(2))
    assert plain.makespan == simulate(schedule).makespan


@pytest.mark.parametrize("zero", [2, 3])
def test_search_compares_by_the_true_makespan(zero):
    """The best order without gathers and reductions would be no better than a registered one."""
    registered, policy = [], ReplicaPolicy(zero, 0)

    def cost(placement):
        return Cost.full_rank(placement, F=3, I=4, W=3, reduce=36, gather=18)

    for name in ("breadth_first", "interleaved_1f1b"):
        schedule = build(name, ranks=2, microbatches=4, chunks=2)
        registered.append(simulate(schedule, cost(schedule.placement), policy).makespan)
    found = search(2, 4, cost_of=cost, policy=policy, placements=["loop"], evaluations=60)
    assert found.value == simulate(found.schedule, cost(found.placement), policy).makespan
    assert found.value < found.baseline_value <= min(registered)
