"""The search against registered schedules, proved optima and its own bound."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import REPLICAS
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.memory import peak_held, peak_weighted
from megapipe.schedule.placement import Placement, loop, mirrored, vee
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.search import PLACEMENTS, Progress, lower_bound, search
from megapipe.schedule.search.beam import beam
from megapipe.schedule.search.greedy import greedy, rules
from megapipe.schedule.search.instance import instance
from megapipe.schedule.search.problem import Order, Problem
from megapipe.schedule.search.registered import registered
from megapipe.schedule.search.stretch import stretched
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts
from tests.unit.schedule.search.optima import OPTIMA, accounting

"""Placement, ranks, micro-batches, objective; F; I; W by stage; latency; limits by rank; freed
share at I; the optimum, proved by a constraint solver."""


# placement, p, m, (F, I, W of a full rank, latency, embedding, head), limit, freed at I, objective,
# the best registered schedule, what the search finds
STRICTLY_BETTER = [
    ("single", 4, 8, (10, 20, 9, 1, 2, 6), 3, 0, "makespan", 669, 520),  # I recomputes
    ("loop", 4, 8, (12, 14, 10, 1, 1, 3), 4, 0, "makespan", 414, 390),
    ("v", 4, 8, (12, 14, 10, 1, 1, 3), 2, 0, "makespan", 461, 450),
    ("v", 4, 8, (10, 20, 8, 2, 2, 5), 3, 0, "makespan", 495, 476),  # I recomputes
    ("loop", 3, 6, (12, 14, 10, 1, 1, 3), Fraction(5, 2), 0, "span", 312, 296),
    ("single", 4, 10, (11, 13, 8, 0, 0, 5), 4, Fraction(1, 3), "span", 498, 485),
    ("v", 4, 8, (12, 14, 10, 2, 1, 4), 3, Fraction(2, 5), "span", 435, 420),
]


def uneven(f, i, w, latency, embedding, head) -> Callable[[Placement], Cost]:
    """Cost even times of a full rank, an embedding before the first stage, a head at the end."""

    def cost(placement: Placement) -> Cost:
        def row(time, first, last):
            times = [time * share for share in placement.stage_shares]
            times[0] += first
            times[-1] += last
            return tuple(times)

        return Cost(
            row(f, embedding, head), row(i, 0, head), row(w, embedding, head), latency=latency
        )

    return cost


def objective_of(schedule: Schedule, cost: Cost, objective: str):
    timeline = simulate(schedule, cost)
    return timeline.makespan if objective == "makespan" else max(timeline.spans)


@in_parts(
    ("name", "p", "m", "cost", "limits", "freed", "objective", "optimum"),
    OPTIMA,
    default=6,
    full=3,
)
def test_within_one_percent_of_the_proved_optimum(
    name, p, m, cost, limits, freed, objective, optimum
):
    found = search(
        p,
        m,
        cost_of=lambda placement: cost,
        placements=[name],
        activation_limit=limits,
        objective=objective,
        evaluations=20_000,
        **accounting(freed),
    )
    assert optimum <= found.value <= optimum * Fraction(101, 100)
    assert found.lower_bound <= optimum
    validate(found.schedule)
    assert found.value == objective_of(found.schedule, cost, objective)
    peaks = peak_weighted(found.schedule, Fraction(freed))
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


@in_parts(
    ("name", "p", "m", "times", "limit", "freed", "objective", "before", "after"),
    STRICTLY_BETTER,
    default=4,
    full=1,
)
def test_strictly_better_than_every_registered_schedule(
    name, p, m, times, limit, freed, objective, before, after
):
    found = search(
        p,
        m,
        cost_of=uneven(*times),
        placements=[name],
        activation_limit=limit,
        objective=objective,
        evaluations=3000,
        **accounting(freed),
    )
    assert found.value <= after < before == found.baseline_value
    assert max(peak_weighted(found.schedule, Fraction(freed))) <= limit


def test_more_effort_finds_more():
    name, p, m, cost, limits, freed, objective, optimum = OPTIMA[4]

    def value(evaluations):
        return search(
            p,
            m,
            cost_of=lambda placement: cost,
            placements=[name],
            activation_limit=limits,
            objective=objective,
            evaluations=evaluations,
            **accounting(freed),
        ).value

    assert value(2000) > value(6000) == optimum


whole = st.integers(1, 12)


@st.composite
def instances(draw):
    ranks, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    name = draw(st.sampled_from(["single", "loop", "v"]))
    stages = PLACEMENTS[name](ranks).stages
    times = [tuple(draw(st.lists(whole, min_size=stages, max_size=stages))) for _ in range(3)]
    cost = Cost(*times, latency=draw(st.integers(0, 4)))
    if draw(st.booleans()):
        cost = replace(cost, I=tuple(2 * time for time in cost.F))  # the forward again
    if draw(st.booleans()):
        cost = replace(cost, B=tuple(draw(whole) for _ in range(stages)))
    half = st.integers(2, 2 * ranks + 2).map(lambda halves: Fraction(halves, 2))
    limit = draw(st.none() | half | st.lists(half, min_size=ranks, max_size=ranks))
    freed = draw(st.sampled_from([Fraction(0), Fraction(1, 3)]))
    objective = draw(st.sampled_from(["makespan", "span"]))
    return ranks, m, name, cost, limit, freed, objective


@pytest.mark.full
@settings(max_examples=60)
@given(instances())
def test_valid_within_the_limit_and_never_worse_than_what_is_registered(drawn):
    ranks, m, name, cost, limit, freed, objective = drawn
    found = search(
        ranks,
        m,
        cost_of=lambda placement: cost,
        placements=[name],
        activation_limit=limit,
        objective=objective,
        evaluations=120,
        **accounting(freed),
    )
    report = validate(found.schedule)
    assert report.bitwise_order
    assert found.placement == PLACEMENTS[name](ranks)
    assert found.value == objective_of(found.schedule, cost, objective) >= found.lower_bound
    limits = [limit] * ranks if isinstance(limit, Fraction) else limit
    peaks = peak_weighted(found.schedule, freed)
    assert limit is None or all(a <= b for a, b in zip(peaks, limits, strict=True))
    for other in ("1f1b", "gpipe", "zb_h1"):
        schedule = build(other, ranks=ranks, microbatches=m)
        held = peak_weighted(schedule, freed)
        if schedule.placement == found.placement and (
            limit is None or all(a <= b for a, b in zip(held, limits, strict=True))
        ):
            assert found.value <= objective_of(schedule, cost, objective)


@settings(max_examples=60)
@given(instances())
def test_the_inner_times_are_those_of_the_simulator(drawn):
    ranks, m, name, cost, limit, freed, objective = drawn
    placement = PLACEMENTS[name](ranks)
    problem = instance(
        placement,
        m,
        cost,
        activation_limit=limit,
        accounting="weighted",
        freed=freed,
        objective=objective,
    )
    order = greedy(problem, next(rules(problem)))
    schedule = problem.schedule(order)
    validate(schedule)
    assert problem.order(schedule) == order
    ends, sequence = problem.ends(order)
    timeline = simulate(schedule, cost)
    assert [[ends[op] for op in ops] for ops in order] == [list(row) for row in timeline.ends]
    value = objective_of(schedule, cost, objective)
    assert problem.value(order, ends) == value
    tails = problem.tails(order, ends, sequence)
    heads = [end - time for end, time in zip(ends, problem.duration, strict=False)]
    assert max(map(sum, zip(heads, tails, strict=False))) == value
    assert problem.fits(order)


@pytest.mark.parametrize("placement", [loop(4), loop(3, 2), vee(4), PLACEMENTS["wave"](2)])
@in_parts("objective", ["makespan", "span"], default=2, full=1)
def test_no_rule_gets_stuck_with_room_for_one_microbatch(placement, objective):
    problem = instance(
        placement, 5, Cost(3, 4, 2, latency=1), activation_limit=1, objective=objective
    )
    for rule in rules(problem):
        schedule = problem.schedule(greedy(problem, rule))
        validate(schedule)
        assert set(peak_held(schedule)) == {1}


def test_a_limit_below_one_microbatch_names_the_smallest_that_fits():
    with pytest.raises(
        ScheduleError, match=r"activation_limit 1/2 is too small.*; it must be at least 1, so"
    ):
        search(4, 4, cost_of=lambda _: Cost(), activation_limit=Fraction(1, 2))
    found = search(
        4, 4, cost_of=lambda _: Cost(), placements=["v"], activation_limit=1, evaluations=50
    )
    assert set(peak_held(found.schedule)) == {1}


def test_equal_arguments_give_equal_schedules():
    def run(seed):
        return search(
            3,
            6,
            cost_of=uneven(12, 14, 10, 1, 1, 3),
            placements=["loop"],
            activation_limit=Fraction(5, 2),
            evaluations=500,
            seed=seed,
        )

    assert run(1) == run(1)
    assert run(1).value <= run(1).baseline_value


def test_the_best_placement_is_found():
    found = search(4, 8, cost_of=uneven(12, 12, 12, 0, 0, 0), activation_limit=4, evaluations=200)
    assert found.value <= 8 * 36 + 3 * 6  # idle for (p-1) operations of half a rank: zb_v
    assert found.placement.stages > 4
    alone = search(
        4,
        8,
        cost_of=uneven(12, 12, 12, 0, 0, 0),
        placements=["single"],
        activation_limit=4,
        evaluations=200,
    )
    assert alone.value == 8 * 36 + 3 * 12  # idle for (p-1)(F+I-W): zb_h1
    assert alone.schedule.name == alone.baseline  # a known one goes first where it is as good


def test_a_cheaper_fused_backward_is_used():
    cost = Cost(F=4, I=4, W=4, B=5)
    found = search(2, 6, cost_of=lambda _: cost, placements=["single"], evaluations=500)
    kinds = {op.kind for rank in range(2) for op in found.schedule.rank_ops(rank)}
    assert kinds == {Kind.F, Kind.B}
    assert found.value == (6 + 1) * 9  # split, it is 76


def test_floats_and_fractions_and_latency_by_link():
    for unit in (Fraction(1, 7), 0.1):
        cost = Cost(3 * unit, (4 * unit, 5 * unit), 2 * unit, latency={(0, 1): unit})
        found = search(2, 5, cost_of=lambda _, cost=cost: cost, placements=["single"])
        assert found.value == simulate(found.schedule, cost).makespan
        assert found.lower_bound <= found.value * (1 if unit == Fraction(1, 7) else 1 + 1e-9)


def test_a_sender_that_waits():
    cost = Cost(4, (5, 7, 6), 3, latency=2, overlap=False)
    found = search(3, 5, cost_of=lambda _: cost, placements=["single"], evaluations=500)
    assert found.value == simulate(found.schedule, cost).makespan
    assert found.value <= found.baseline_value


def test_progress_only_gets_better_within_a_placement():
    told: list[Progress] = []
    found = search(
        3,
        6,
        cost_of=uneven(12, 14, 10, 1, 1, 3),
        placements=["loop"],
        activation_limit=Fraction(5, 2),
        evaluations=500,
        progress=told.append,
    )
    values = [progress.value for progress in told]
    assert values == sorted(values, reverse=True)
    assert values[-1] == found.value
    assert {progress.placement for progress in told} == {loop(3, 2)}


def test_the_bound_is_the_closed_form_where_that_is_reached():
    cost = Cost(4, 4, 4)
    for p, m in ((2, 4), (4, 9), (8, 20)):
        assert lower_bound(loop(p), m, cost, objective="span") == m * 12
        assert lower_bound(loop(p), m, cost, activation_limit=p) == m * 12 + (p - 1) * 4
    assert lower_bound(loop(2), 1, Cost(1, 2, 4)) == 2 * 1 + 2 * 2 + 4  # there and back, one W


def test_a_stretched_order_repeats_the_steady_state():
    cost = Cost(3, 3, 3)
    short = instance(loop(3), 6, cost, activation_limit=3)
    long = instance(loop(3), 31, cost, activation_limit=3)
    order = short.order(build("zb_h1", ranks=3, microbatches=6))
    best = min(timed.value for timed in stretched(short, order, long, 10))
    assert (
        best == simulate(build("zb_h1", ranks=3, microbatches=31), cost).makespan == 31 * 9 + 2 * 3
    )


@pytest.mark.parametrize("row", [7, 9, 18, 22])
def test_a_beam_is_exact_on_some_small_instances(row):
    name, p, m, cost, limits, freed, objective, optimum = OPTIMA[row]
    problem = instance(
        PLACEMENTS[name](p),
        m,
        cost,
        activation_limit=limits,
        objective=objective,
        **accounting(freed),
    )
    order: Order = beam(problem, 100)
    validate(problem.schedule(order))
    assert problem.fits(order)
    assert problem.timed(order).value == optimum


def test_registered_schedules_that_do_not_fit_are_left_out():
    problem: Problem = instance(loop(4), 8, Cost(), activation_limit=3)
    assert {each.schedule.name for each in registered(problem, REPLICAS)} >= {"zb_1p", "naive"}
    assert not {each.schedule.name for each in registered(problem, REPLICAS)} & {
        "zb_h1",
        "gpipe",
        "1f1b",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"placements": ["ring"]},
            "placement 'ring' is unknown; known placements are single, loop",
        ),
        ({"placements": []}, "no placement was given"),
        ({"placements": [loop(3)]}, "a placement has 3 ranks; the search is for 2"),
        ({"placements": [mirrored(loop(2))]}, "the placement has 2 directions; it must have one"),
        ({"objective": "speed"}, "objective must be makespan or span, not 'speed'"),
        ({"accounting": "full"}, "accounting must be held or weighted, not 'full'"),
        ({"accounting": "weighted", "freed": 2}, "freed must be from 0 to 1, not 2"),
        ({"activation_limit": [1]}, "1 memory limits for 2 ranks"),
        ({"activation_limit": float("inf")}, "activation_limit must be a number, not inf"),
        ({"evaluations": 0}, "evaluations must be at least 1, not 0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        search(2, 2, cost_of=lambda _: Cost(), **arguments)


def test_no_microbatch():
    with pytest.raises(ScheduleError, match="microbatches must be at least 1, not 0"):
        search(2, 0, cost_of=lambda _: Cost())
