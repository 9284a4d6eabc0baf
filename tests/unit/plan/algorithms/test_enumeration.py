"""The core of enumeration; PipeDream-2BW's planner and SPP against brute force."""

import itertools
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from megapipe.plan.algorithms.batch import microbatch_counts
from megapipe.plan.algorithms.device_order import by_minimum_cuts, minimum_cut
from megapipe.plan.algorithms.enumeration import Front, best_choices, cheapest
from megapipe.plan.algorithms.judge import judge, message_seconds, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.planners import spp, two_bw
from megapipe.plan.algorithms.problem import ChainUnit, Links, Problem, UnitCost
from megapipe.plan.algorithms.stages import period
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.search.problem import Problem as OrderProblem
from tests.unit.plan.algorithms.random_chains import SLOW, all_cuts, random_units


def test_candidates_behind_the_bound_are_not_evaluated() -> None:
    costs = {"a": 5, "b": 4, "c": 7, "d": None}
    bounds = {"a": 3, "b": 1, "c": 4, "d": 0}
    found = cheapest(costs, bounds.__getitem__, costs.__getitem__)
    assert found == ("b", 4, 3)
    assert cheapest("d", bounds.__getitem__, costs.__getitem__) is None


def test_a_front_keeps_what_nothing_dominates() -> None:
    random = Random(0)
    points = [(random.randrange(9), random.randrange(9), random.randrange(9)) for _ in range(200)]
    front = Front((point, point) for point in points)
    expected = {
        point
        for point in points
        if not any(
            other != point and all(a <= b for a, b in zip(other, point, strict=True))
            for other in points
        )
    }
    kept = [candidate for _, candidate in front]
    assert sorted(kept) == sorted(expected)
    assert [point[0] for point in kept] == sorted(point[0] for point in kept)


def test_choices_that_nothing_dominates_are_those_of_brute_force() -> None:
    """Choose a number of each pair, at most 12 in all, for a small sum and large squares."""
    pairs = [(1, 5), (2, 3), (4, 2), (1, 6)]

    def extend(costs: tuple[float, ...], chosen: tuple[int, ...]) -> tuple[float, ...] | None:
        total = costs[0] + chosen[-1]
        return (total, costs[1] + 36 - chosen[-1] ** 2) if total <= 12 else None

    found = [costs for costs, _ in best_choices(pairs, extend, len, (0, 0))]
    every = [
        (sum(each), sum(36 - number**2 for number in each)) for each in itertools.product(*pairs)
    ]
    expected = Front((costs, None) for costs in every if costs[0] <= 12)
    assert found == [costs for costs, _ in expected]
    assert len(found) > 3


@pytest.mark.parametrize("memory", [1e9, 60, 40])
def test_the_plan_of_2bw_is_that_of_exhaustive_simulation(memory: float) -> None:
    """Eight devices, 12 blocks; widths, depths, micro-batches and recomputation."""
    links = Links(inside=3.0, between=1.0, per_node=4)
    block = random_units(1, 3)[0]
    problem = Problem((block,) * 12, 8, 8, samples=2, memory=memory, links=links)
    found = two_bw.enumerate_all(problem)
    every = [
        (plan, judge(problem.with_microbatches(plan.microbatches), plan))
        for plan in two_bw.candidates(problem)
    ]
    assert {plan.microbatches for plan, _ in every} == {1, 2, 4, 8, 16}
    assert {len(plan.stages) for plan, _ in every} == {1, 2, 4, 8}
    assert found is not None
    assert found.cost == min(each.seconds for _, each in every if each.fits)
    assert found.evaluated < len(every) / 2
    for plan, judged in every:
        sized = problem.with_microbatches(plan.microbatches)
        assert two_bw.closed_form(sized, plan) <= judged.seconds * (1 + 1e-9)


def test_the_closed_form_is_the_time_of_equal_stages() -> None:
    problem = Problem((random_units(1, 0)[0],) * 8, 4, 6, links=Links())
    plans = [plan for plan in two_bw.candidates(problem) if plan.microbatches == 6]
    assert len(plans) == 6
    for plan in plans:
        judged = judge(problem, plan)
        assert two_bw.closed_form(problem, plan) == pytest.approx(judged.seconds)


def test_numbers_of_micro_batches() -> None:
    units = random_units(1, 0)
    assert microbatch_counts(Problem(units, 1, 6, samples=2)) == [1, 2, 3, 4, 6, 12]
    assert microbatch_counts(Problem(units, 1, 3, samples=0.5)) == [3, 6, 12, 24]


def test_the_minimum_cut_is_that_of_brute_force() -> None:
    random = Random(0)
    for size in (3, 5, 6):
        speed = {pair: random.random() for pair in itertools.product(range(size), repeat=2)}

        def across(side: list[int] | tuple[int, ...]) -> float:
            rest = [each for each in range(size) if each not in side]  # noqa: B023
            return sum(speed[a, b] + speed[b, a] for a in side for b in rest)  # noqa: B023

        sides = (s for k in range(1, size) for s in itertools.combinations(range(size), k))
        found = minimum_cut(range(size), lambda a, b: speed[a, b])  # noqa: B023
        assert across(found) == pytest.approx(min(map(across, sides)))


def test_devices_of_a_node_are_neighbours() -> None:
    nodes = [[0, 3, 5], [1, 4], [2, 6, 7]]
    near = {pair for node in nodes for pair in itertools.product(node, repeat=2)}
    order = by_minimum_cuts(range(8), lambda a, b: 9.0 if (a, b) in near else 0.5)
    assert sorted(order) == list(range(8))
    assert sum((a, b) in near for a, b in pairwise(order)) == 5


def pipeline_period(problem: Problem, stages: tuple[PlannedStage, ...]) -> float:
    """Return the period of a cyclic pipeline: of its slowest rank or link."""
    ranks = [period(problem, stage_load(problem, each)) for each in stages]
    return max(ranks + [2 * message_seconds(problem, *pair) for pair in pairwise(stages)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("stages", [2, 3])
def test_the_list_is_within_its_bound_of_the_best_order(stages: int, seed: int) -> None:
    """All orders of three micro-batches, on links of random speed."""
    random, count = Random(seed), 3
    units = [
        ChainUnit("unit", {(1, 1): UnitCost(*(random.uniform(1, 2) for _ in range(3)), message=1)})
        for _ in range(stages)
    ]
    speed = [[random.choice([0.3, 1, 9]) for _ in units] for _ in units]
    problem = Problem(tuple(units), stages, count, links=Links(matrix=speed))
    own = tuple(stage(rank, rank + 1, [rank]) for rank in range(stages))
    judged = judge(problem, PlannedPipeline(own, count, spp.list_schedule(stages, count)))
    validate(judged.timeline.schedule)
    made = spp.PlannedList(own, pipeline_period(problem, own))
    assert judged.seconds <= made.bound(count)
    orders = OrderProblem(
        judged.timeline.schedule.placement, count, judged.timeline.cost, fused=True
    )
    choices = [list(rank_orders(rank, stages, count)) for rank in range(stages)]
    timed = (orders.timed(list(each)) for each in itertools.product(*choices))
    best = min(float(each.value) for each in timed if each is not None)
    print(f"SPP's list: {judged.seconds / best - 1:+.1%} of the best order")
    assert judged.seconds >= best * (1 - 1e-9)
    assert judged.seconds <= (1 + (4 * stages - 4) / count) * max(best, count * made.period)


def rank_orders(rank: int, stages: int, count: int) -> Iterator[list[int]]:
    """Yield all orders of a rank's forwards and backwards, each in micro-batch order."""
    for places in itertools.combinations(range(2 * count), count):
        forwards = iter(range(rank * count, (rank + 1) * count))
        backwards = iter(range((stages + rank) * count, (stages + rank + 1) * count))
        yield [next(forwards if at in places else backwards) for at in range(2 * count)]


@pytest.mark.parametrize("seed", range(4))
def test_spp_is_within_its_bound_of_all_orders_cuts_and_replicas(seed: int) -> None:
    random, size, count = Random(seed), 4, 4
    speed = [[0.0] * size for _ in range(size)]
    for a, b in itertools.combinations(range(size), 2):
        speed[a][b] = speed[b][a] = random.choice([0.05, 0.2, 1, 5])
    units = random_units(5, seed, gradients=3.0)
    problem = Problem(units, size, count, links=Links(matrix=speed))
    plan = spp.plan(problem)
    assert plan is not None
    validate(judge(problem, plan).timeline.schedule)
    best_period = best = float("inf")
    for stages in all_placements(5, size):
        own = pipeline_period(problem, stages)
        best_period = min(best_period, own)
        if count * own < best:  # no order of this pipeline takes less than all periods
            orders = (spp.list_schedule(len(stages), count), "1f1b")
            plans = (PlannedPipeline(stages, count, order) for order in orders)
            shortest = min(judge(problem, each).seconds for each in plans)
            best = min(best, max(count * own, shortest))
    found, own = judge(problem, plan).seconds, pipeline_period(problem, plan.stages)
    print(f"SPP: {found / best - 1:+.1%} of the best pipeline, period {own / best_period - 1:+.1%}")
    factor = (count + 4 * len(plan.stages) - 4) / count
    assert found <= spp.PlannedList(plan.stages, own).bound(count)
    assert found <= factor * own / best_period * best


def all_placements(units: int, devices: int) -> Iterator[tuple[PlannedStage, ...]]:
    """Yield the pipelines on all orders of devices."""
    for order in itertools.permutations(range(devices)):
        for count in range(1, min(units, devices) + 1):
            for starts in all_cuts(devices, count):
                for ends in all_cuts(units, count):
                    both = zip(pairwise(ends), pairwise(starts), strict=True)
                    yield tuple(stage(*own, order[a:b]) for own, (a, b) in both)


def test_spp_plans_nodes_as_they_are_and_says_if_nothing_fits() -> None:
    units = random_units(6, 0, gradients=3.0)
    plan = spp.plan(Problem(units, 4, 8, links=SLOW))
    assert plan is not None
    assert sorted(each for group in plan.groups for each in group) == [0, 1, 2, 3]
    full = judge(Problem(units, 4, 8, links=SLOW), plan)
    less = spp.plan(Problem(units, 4, 8, memory=max(full.peaks) - 1, links=SLOW))
    assert less is not None
    assert (less.stages, less.schedule) == (plan.stages, "1f1b")
    assert spp.plan(Problem(units, 4, 8, memory=2, links=SLOW)) is None
    odd = Problem(units, 3, 2, samples=2, whole_samples=True)
    plan = spp.plan(odd)
    assert plan is not None
    assert sum(map(len, plan.groups)) == 3
