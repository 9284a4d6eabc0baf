"""The core of local search, and the planners on it against brute force."""

import itertools
from math import inf
from random import Random

import pytest

from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.local_search import Trials, anneal, descend, from_starts, in_turn
from megapipe.plan.algorithms.planners import aceso, adaptis
from megapipe.plan.algorithms.planners.device_placement import (
    DevicePlacement,
    mirhoseini,
    spotlight,
)
from megapipe.plan.algorithms.problem import ChainUnit, Problem
from megapipe.plan.algorithms.registry import algorithm
from megapipe.plan.algorithms.stages import Uniform
from megapipe.schedule.proof.validate import validate
from tests.unit.plan.algorithms.random_chains import (
    SLOW,
    all_cuts,
    one_device_each,
    random_units,
)

VALLEYS = [5, 4, 3, 6, 8, 7, 2, 1, 9]
"""Costs of the states 0 to 8, with two local minima: 2 and 7."""


def neighbours(state: int) -> list[int]:
    return [each for each in (state - 1, state + 1) if 0 <= each < len(VALLEYS)]


def test_a_descent_ends_where_no_move_helps_and_hops_lead_out() -> None:
    assert descend(Trials(VALLEYS.__getitem__, 99), 0, neighbours) == 2
    assert descend(Trials(VALLEYS.__getitem__, 99), 0, neighbours, hops=4) == 7


def test_a_search_keeps_its_limit_and_the_best_state_so_far() -> None:
    trials = Trials(lambda state: None if state == 6 else VALLEYS[state], 3)
    assert [trials(state) for state in (3, 6, 3, 2, 7, 2)] == [6, inf, 6, 3, inf, 3]
    assert (trials.best, trials.least, trials.trace, trials.left) == (2, 3, [6, 6, 3], 0)


def test_a_search_from_all_starts_finds_the_least() -> None:
    trials = Trials(VALLEYS.__getitem__, 99)
    from_starts(trials, range(9), lambda start: descend(trials, start, neighbours))
    assert trials.best == 7


def test_coordinates_are_changed_until_none_helps() -> None:
    trials = Trials(lambda state: abs(state[0] - 3) + abs(state[0] - state[1]), 999)
    first = in_turn(
        trials,
        (0, 0),
        [lambda s: [(x, s[1]) for x in range(6)], lambda s: [(s[0], y) for y in range(6)]],
    )
    assert trials(first) == min(trials(each) for each in ((x, first[1]) for x in range(6)))


def test_a_cold_walk_descends_and_a_hot_one_leaves_a_valley() -> None:
    def walked(temperature: float) -> Trials[int]:
        trials, random = Trials(VALLEYS.__getitem__, 99), Random(0)
        step = lambda state: random.choice(neighbours(state))  # noqa: E731
        anneal(trials, 0, step, random, temperature=temperature, steps=300)
        return trials

    assert walked(0.01).best == 2
    assert walked(2.0).best == 7


@pytest.mark.parametrize("seed", range(6))
def test_aceso_reaches_the_optimum_in_200_moves(seed: int) -> None:
    problem = Problem(random_units(5, seed), 3, 6, memory=21, links=SLOW)
    plans = (
        judge(problem, one_device_each(problem, ends, recompute))
        for ends in all_cuts(5, 3)
        for count in range(6)
        for recompute in itertools.combinations(range(5), count)
    )
    optimum = min((each.seconds for each in plans if each.fits), default=inf)
    found = aceso.Aceso(problem).run(3, 200)
    assert found.trace == sorted(found.trace, reverse=True)
    assert len(found.trace) <= 200
    if optimum == inf:
        assert found.best is None or found.least >= aceso.TOO_LARGE
    else:
        print(f"Aceso: {found.least / optimum - 1:+.2%} of the optimum")
        assert found.least <= optimum * (1 + 1e-9)


def test_aceso_is_no_worse_than_equal_stages_and_says_if_nothing_fits() -> None:
    units = random_units(5, 0, (1, 2))
    problem = Problem(units, 4, 4, samples=2, memory=40, links=SLOW, whole_samples=True)
    plan, equal = aceso.plan(problem), algorithm("pipedream_2bw").plan(problem)
    assert plan is not None
    assert equal is not None
    found, other = (
        judge(problem.with_microbatches(each.microbatches), each) for each in (plan, equal)
    )
    assert found.fits
    assert found.seconds <= other.seconds
    assert aceso.plan(Problem(units[:2], 2, 2, memory=2, links=SLOW)) is None


@pytest.mark.parametrize("seed", range(3))
def test_adaptis_beats_each_tuning_alone(seed: int) -> None:
    *units, last = random_units(10, seed)
    heavy = ChainUnit("head", {key: cost.scaled(4) for key, cost in last.costs.items()})
    problem = Problem((*units, heavy), 4, 8, memory=80, links=SLOW)
    search = adaptis.AdaPtis(problem, Uniform(4, 1, 1))
    alone = [search.trials(search.alone(number)) for number in range(3)]
    found = search.run()
    assert found.best is not None
    gain = found.least / min(alone) - 1
    print(f"AdaPtis: {gain:+.1%} of the best of partition, placement and schedule alone")
    assert found.least <= min(alone) <= found(search.start)
    judged = judge(problem, search.plan(found.best))
    assert judged.fits
    assert judged.seconds == found.least
    validate(judged.timeline.schedule)


def test_device_placement_comes_near_the_optimum_of_cuts() -> None:
    problem = Problem(random_units(12, 0), 3, 3, links=SLOW)
    search = DevicePlacement(problem, Uniform(3, 1, 1))
    cuts = all_cuts(12, 3)
    rows = [
        tuple(rank for rank in range(3) for _ in range(ends[rank], ends[rank + 1])) for ends in cuts
    ]
    optimum = min(search.judged(row)[1].seconds for row in rows)
    for found in (search.random_then_local(80), search.one_by_one(80)):
        print(f"device placement: {found.least / optimum - 1:+.1%} of the best cuts")
        assert found.best is not None
        assert found.least <= 1.05 * optimum
        validate(search.judged(found.best)[1].timeline.schedule)


def test_planners_of_placements_return_plans_that_fit() -> None:
    problem = Problem(random_units(4, 0), 2, 2, memory=40, links=SLOW)
    for plan in (mirhoseini, spotlight):
        found = plan(problem)
        assert found is not None
        assert judge(problem, found).fits
    assert mirhoseini(Problem(random_units(4, 0), 2, 2, memory=2)) is None
