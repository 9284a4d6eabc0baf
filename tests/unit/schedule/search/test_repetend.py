"""Repetends and their completion against brute force and the exact search; skipped without
OR-Tools."""

from fractions import Fraction
from pathlib import Path

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.memory import peak_held, peak_weighted
from megapipe.schedule.placement import loop, m_shape, mirrored, vee, wave
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import simulate
from tests.unit.schedule.search.brute_force import shortest_makespan

pytest.importorskip("ortools", reason="the extra `exact` is not installed")
from megapipe.schedule.search.exact import solve
from megapipe.schedule.search.tessel import search_repetend

ROOT = Path(__file__).parents[4]
FUSED = Cost(I=2, W=1, B=2)
"""Unit costs of fused backwards: split ones would take longer."""
SHAPES = {"chain": loop, "v": vee, "m": m_shape}


@pytest.mark.parametrize(
    ("shape", "fused", "microbatches"),
    [
        *(("chain", True, 3), ("v", True, 3), ("m", True, 3)),
        *(("chain", False, 3), ("v", False, 1), ("m", False, 1)),
    ],
)
def test_plans_of_two_ranks_equal_brute_force(shape, fused, microbatches):
    placement = SHAPES[shape](2)
    least = shortest_makespan(placement, microbatches, Cost(), fused=fused)
    exact = solve(placement, microbatches, Cost(), fused=fused)
    assert exact.value == exact.bound == least
    plan = search_repetend(placement, microbatches, FUSED if fused else Cost())
    assert plan.value == least


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_of_two_ranks_equal_the_exact_search(shape, fused, limit):
    """With 8 micro-batches the solver completes a repetend, with 2 it orders all operations."""
    placement, cost = SHAPES[shape](2), FUSED if fused else Cost()
    slow = (shape, fused, limit) == ("m", True, 2)  # the exact search of 8 micro-batches
    for microbatches in (2, 4 if slow else 8):
        exact = solve(placement, microbatches, cost, fused=fused, activation_limit=limit)
        assert exact.proved
        plan = search_repetend(placement, microbatches, cost, activation_limit=limit)
        assert plan.value == exact.value
        assert plan.lower_bound <= plan.value
        validate(plan.schedule)
        assert limit is None or max(peak_held(plan.schedule)) <= limit


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_repetend_of_a_chain_is_1f1b(ranks):
    """Compare the period and the makespan, with as many micro-batches in flight as ranks."""
    for microbatches in (ranks, 50):
        plan = search_repetend(loop(ranks), microbatches, FUSED, activation_limit=ranks)
        ours = simulate(plan.schedule, FUSED)
        theirs = simulate(build("1f1b", ranks=ranks, microbatches=microbatches), FUSED)
        assert (plan.period, plan.in_flight, plan.proved) == (3, ranks, True)
        assert plan.value == ours.makespan == theirs.makespan == 3 * (microbatches + ranks - 1)


def test_the_effort_does_not_depend_on_the_number_of_microbatches():
    few, many = (search_repetend(m_shape(2), count, Cost()) for count in (9, 500))
    assert (few.period, many.period) == (9, 9)
    assert many.value - few.value == 9 * (500 - 9)
    assert validate(many.schedule).ops == 500 * 2 * 3 * 3


def test_the_example_of_the_page():
    cost = Cost.full_rank(m_shape(4))
    plan = search_repetend(m_shape(4), 8, cost)
    assert (plan.value, plan.lower_bound) == (25, 24)
    page = (ROOT / "docs/schedules.md").read_text(encoding="utf-8")
    assert "a makespan of 25 where none is below 24" in " ".join(page.split())


def test_a_stage_on_all_ranks_runs_on_all_at_once():
    plan = search_repetend(m_shape(3), 6, Cost(latency=Fraction(1, 2)), seconds=2)
    timeline = simulate(plan.schedule, Cost(latency=Fraction(1, 2)))
    starts = [
        dict(zip(plan.schedule.rank_ops(rank), timeline.starts[rank], strict=True))
        for rank in range(3)
    ]
    meetings = [op for op in starts[0] if op.stage in (0, 4) and op.kind.name != "W"]
    assert len(meetings) == 2 * 2 * 6
    assert all(row[op] == starts[0][op] for row in starts for op in meetings)


@pytest.mark.parametrize(
    ("placement", "limit", "freed"),
    [(vee(2), 2, Fraction(1, 2)), (wave(2, 2), 2, 0), (m_shape(2), Fraction(3, 2), 0)],
)
def test_uneven_stages_within_memory(placement, limit, freed):
    stages = placement.stages
    cost = Cost(
        F=tuple(1 + stage % 2 for stage in range(stages)),
        I=tuple(2 - stage % 2 for stage in range(stages)),
        latency=Fraction(1, 3),
    )
    accounting = "weighted" if freed else "held"
    plan = search_repetend(
        placement, 20, cost, activation_limit=limit, accounting=accounting, freed=freed, seconds=2
    )
    validate(plan.schedule)
    assert plan.value == simulate(plan.schedule, cost).makespan >= plan.lower_bound
    assert max(peak_weighted(plan.schedule, Fraction(freed))) <= limit


def test_operations_without_time():
    """An embedding that takes no time is in all lists at the same place."""
    cost = Cost(F=(0, 1, 1, 2), I=(0, 1, 1, 2), W=(0, 1, 1, 0), latency=1)
    plan = search_repetend(m_shape(2), 9, cost, seconds=4)
    validate(plan.schedule)
    assert plan.period == 2 + 2 + 3
    with pytest.raises(ScheduleError, match="the operations take no time"):
        search_repetend(m_shape(2), 9, Cost(F=0, I=0, W=0))


def test_what_cannot_be_searched():
    with pytest.raises(ScheduleError, match="has 2 directions; it must have one"):
        search_repetend(mirrored(loop(2)), 4, Cost())
    with pytest.raises(ScheduleError, match="too small; it must be at least 1, so that"):
        search_repetend(m_shape(2), 4, Cost(), activation_limit=Fraction(1, 2))
    with pytest.raises(ScheduleError, match="gathers and reductions that take no time"):
        search_repetend(loop(2), 4, Cost(reduce=1))
    with pytest.raises(ScheduleError, match="unequal links cannot be simulated if a stage"):
        search_repetend(m_shape(2), 4, Cost(latency={(0, 1): 1}))
    with pytest.raises(ScheduleError, match="microbatches must be at least 1, not 0"):
        search_repetend(loop(2), 0, Cost())
