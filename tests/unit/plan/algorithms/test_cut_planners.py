"""Planners of pipelines against brute force; gaps of those that are not optimal are printed."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import inf

import pytest

from megapipe.plan.algorithms.cuts import Step, partitions
from megapipe.plan.algorithms.judge import judge, stage_load
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, stage
from megapipe.plan.algorithms.planners import (
    adapipe,
    autopipe,
    dapple,
    dawnpiper,
    hybrid,
    mcap,
    merak,
    pipe_torch,
    pipedream,
)
from megapipe.plan.algorithms.problem import ChainUnit, Links, Problem, UnitCost
from megapipe.plan.algorithms.recompute import cheapest_recomputation, recomputed
from megapipe.plan.algorithms.stages import Uniform, peak, period
from tests.unit.plan.algorithms.random_chains import (
    SLOW,
    all_cuts,
    one_device_each,
    random_units,
)


def compositions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the ordered sums of positive numbers that make `count`."""
    if not count:
        yield ()
    for first in range(1, count + 1):
        for rest in compositions(count - first):
            yield (first, *rest)


def pipelines(first: int, last: int, workers: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield all pipelines of units on workers, as (first, last, workers) of their stages."""
    for counts in compositions(workers):
        if len(counts) > last - first:
            continue
        for ends in all_cuts(last - first, len(counts)):
            spans = pairwise(first + end for end in ends)
            yield [(a, b, n) for (a, b), n in zip(spans, counts, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_the_core_finds_the_least_sum_and_maximum(seed: int) -> None:
    given = Problem(random_units(7, seed), 3, 5)

    def cost(first: int, last: int) -> tuple[float, float]:
        own = given.cost(first, last)
        return own.forward + own.backward, own.saved

    def steps(at: int, after: int, count: object) -> Iterator[Step]:
        assert isinstance(count, int)
        yield Step(count + 1, *cost(at, after), stage(at, after, [0]))

    found = partitions(range(8), 0, steps)[3]
    every = [[cost(*span) for span in pairwise(ends)] for ends in all_cuts(7, 3)]
    points = {(sum(total for total, _ in each), max(high for _, high in each)) for each in every}
    for weight in (0.0, 1.0, 10.0):
        least = min(total + weight * high for total, high in points)
        assert min(e.total + weight * e.slowest for e in found) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(4))
def test_pipedream_equals_brute_force_on_two_levels(seed: int) -> None:
    links = Links(inside=0.6, between=0.3, per_node=2)
    given = Problem(random_units(7, seed, gradients=4.0), 4, 6, samples=4, links=links)

    def sent(first: int, nodes: int, speed: float) -> float:
        return 2 * given.units[first - 1].cost(1, 4 / nodes).message / speed

    def within(first: int, last: int, nodes: int) -> float:
        found = inf
        for made in pipelines(first, last, 2):
            worst = 0.0
            for number, (a, b, n) in enumerate(made):
                costs = [given.units[k].cost(1, 4 / (n * nodes)) for k in range(a, b)]
                sync = 2 * (n - 1) / n * sum(c.gradients for c in costs) / links.inside / 6
                worst = max(worst, sum(c.forward + c.backward for c in costs), sync)
                worst = max(worst, sent(a, nodes, links.inside) if number else 0.0)
            found = min(found, worst)
        return found

    least = inf
    for made in pipelines(0, 7, 2):
        worst = 0.0
        for number, (a, b, n) in enumerate(made):
            gradients = sum(given.units[k].cost(1, 4).gradients for k in range(a, b))
            sync = 2 * (n - 1) / n * gradients / links.between / 6
            worst = max(worst, within(a, b, n), sync, sent(a, n, links.between) if number else 0)
        least = min(least, worst)
    found = pipedream.nested(given)
    assert found is not None
    assert found.outer.slowest == pytest.approx(least)
    plan = pipedream.plan(given)
    assert plan is not None
    assert sorted(device for each in plan.stages for device in each.devices) == [0, 1, 2, 3]
    assert judge(given, plan).seconds > 0


def test_mcap_has_the_least_peak() -> None:
    skewed = [*random_units(8, 1)]
    heavy = skewed[6].costs[1, 1]._replace(saved=20.0, weights=30.0)
    skewed[6] = ChainUnit("heavy", {(1, 1): heavy})
    given = Problem(tuple(skewed), 4, 8, whole_samples=True)
    plans = [one_device_each(given, ends) for ends in all_cuts(8, 4)]
    plan = mcap.plan(given)
    assert plan is not None
    least = min(max(judge(given, each).peaks) for each in plans)
    assert max(judge(given, plan).peaks) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(3))
def test_dapple_is_near_the_best_of_all_placements(seed: int) -> None:
    given = Problem(random_units(5, seed), 4, 6, samples=4, links=SLOW)
    found = dapple.plan(given)
    assert found is not None

    def placed(made: Sequence[tuple[int, int, int]], used: tuple[int, int]) -> Iterator[list]:  # type: ignore[type-arg]
        if not made:
            yield []
            return
        (first, last, count), *rest = made
        for taken in dapple.placements(used, 2, count):
            own = [2 * at + used[at] + k for at in (0, 1) for k in range(taken[at])]
            for more in placed(rest, (used[0] + taken[0], used[1] + taken[1])):
                yield [stage(first, last, own), *more]

    every = [
        PlannedPipeline(tuple(stages), 6)
        for made in pipelines(0, 5, 4)
        for stages in placed(made, (0, 0))
    ]
    best = min(judge(given, each).seconds for each in every)
    gap = judge(given, found).seconds / best - 1
    print(f"DAPPLE's gap to the best of {len(every)} plans: {gap:.2%}")
    assert -1e-9 < gap < 0.05


def test_placements_differ_as_published() -> None:
    assert list(dapple.placements((1, 0), 2, 1)) == [(0, 1), (1, 0)]
    assert list(dapple.placements((1, 0, 0), 2, 3)) == [(0, 2, 1), (1, 2, 0), (1, 1, 1)]


def every_hybrid(given: Problem) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yield all pipelines with replicas and degrees, as (first, last, replicas, tp)."""
    options = list(product(given.replica_counts, given.tensor_sizes))
    for made in pipelines(0, given.length, given.devices):
        own = [[(r, t) for r, t in options if r * t == n] for _, _, n in made]
        for chosen in product(*own):
            yield [(a, b, *each) for (a, b, _), each in zip(made, chosen, strict=True)]


def hybrid_least(given: Problem, rules: hybrid.Rules) -> float:
    """Return the least objective of all pipelines, by brute force."""

    @lru_cache(None)
    def cost(first: int, last: int, start: int, replicas: int, tp: int, after: int) -> float:
        for recompute in (False, True)[: 1 + rules.recomputes]:
            made = stage(first, last, range(start, start + replicas * tp), tp, recompute)
            load = stage_load(given, made)
            if peak(load, after, given.microbatches) <= given.memory:
                return period(given, load)
        return inf

    least, m = inf, given.microbatches
    for made in every_hybrid(given):
        start, total, slowest = 0, 0.0, 0.0
        for number, (a, b, r, t) in enumerate(made):
            end = start + r * t
            if rules.submeshes and not hybrid._is_submesh(given.links, start, end):
                total = inf
            seconds = cost(a, b, start, r, t, len(made) - 1 - number)
            sent = 0.0
            if rules.messages and a:
                message = given.cost(a - 1, a, t, r).message
                sent = 2 * message / given.links.speed(start - 1, start)
            total += seconds + sent
            slowest = max(slowest, seconds if rules.adds_up else seconds + sent)
            start = end
        whole = total + (m - 1) * slowest if rules.adds_up else (m - 1) * slowest
        least = min(least, whole if total < inf else inf)
    return least


PUBLISHED = {
    "piper": hybrid.Rules(adds_up=False, messages=True, recomputes=True),
    "efftra": hybrid.Rules(adds_up=True, messages=True, recomputes=False),
    "alpa": hybrid.Rules(adds_up=True, messages=False, recomputes=True, submeshes=True),
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("memory", [inf, 22.0])
def test_hybrid_planners_equal_brute_force(name: str, memory: float) -> None:
    rules = PUBLISHED[name]
    links = Links(inside=3.0, between=1.0, per_node=4)
    units = random_units(6, 3, (1, 2))
    given = Problem(units, 8, 6, samples=4, links=links, memory=memory, whole_samples=True)
    least = hybrid_least(given, rules)
    plan = getattr(hybrid, name)(given)
    if plan is None:
        assert least == inf
        return
    total = slowest = 0.0
    for each in plan.stages:
        tp, seconds = each.choices[0].tp, period(given, stage_load(given, each))
        sent = 0.0
        if rules.messages and each.first:
            message = given.cost(each.first - 1, each.first, tp, each.replicas(each.first)).message
            sent = 2 * message / given.links.speed(each.devices[0] - 1, each.devices[0])
        total += seconds + sent
        slowest = max(slowest, seconds if rules.adds_up else seconds + sent)
    assert total * rules.adds_up + 5 * slowest == pytest.approx(least)
    assert judge(given, plan).fits


def test_piper_plans_eight_layers_on_eight_devices() -> None:
    given = Problem(
        random_units(8, 5, (1, 2)), 8, 8, samples=2, links=SLOW, memory=30, whole_samples=True
    )
    plan = hybrid.piper(given)
    assert plan is not None
    slowest = max(period(given, stage_load(given, each)) for each in plan.stages)
    assert 7 * slowest <= hybrid_least(given, PUBLISHED["piper"]) + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_efftra_is_as_good_as_dapple_within_a_node(seed: int) -> None:
    given = Problem(random_units(6, seed), 4, 6, samples=4, links=Links(inside=3.0, per_node=4))
    own, other = hybrid.efftra(given), dapple.plan(given)
    assert own is not None
    assert other is not None
    gap = judge(given, own).seconds / judge(given, other).seconds - 1
    print(f"EffTra's gap to DAPPLE: {gap:.2%}")
    assert gap < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_adapipe_against_all_cuts_and_flags(seed: int) -> None:
    given = Problem(random_units(7, seed), 3, 6, memory=28.0, whole_samples=True)
    plan = adapipe.plan(given)
    best = inf
    for ends, flags in product(all_cuts(7, 3), product((0, 1), repeat=7)):
        made = one_device_each(given, ends, [unit for unit in range(7) if flags[unit]])
        loads = [stage_load(given, each) for each in made.stages]
        if all(peak(load, 2 - n, 6) <= given.memory for n, load in enumerate(loads)):
            longest = max(load.forward + load.backward for load in loads)
            if 6 * longest < best:  # a lower bound of the simulated time
                best = min(best, judge(given, made).seconds)
    assert plan is not None
    assert best < inf
    judged = judge(given, plan)
    gap = judged.seconds / best - 1
    print(f"AdaPipe's gap to brute force: {gap:.2%}")
    assert judged.fits
    assert any(choice.recompute for each in plan.stages for choice in each.choices)
    assert -1e-9 < gap < 0.03


@pytest.mark.parametrize("seed", range(6))
def test_the_knapsack_takes_the_least_time(seed: int) -> None:
    given = Problem(random_units(7, seed), 1, 6, memory=35.0)
    whole, least = stage(0, 7, [0]), inf
    for flags in product((0, 1), repeat=7):
        made = recomputed(whole, [unit for unit in range(7) if flags[unit]])
        load = stage_load(given, made)
        if peak(load, 1, 6) <= given.memory:
            least = min(least, load.backward)
    found = cheapest_recomputation(given, whole, 1)
    if least == inf:
        assert found is None
        return
    assert found is not None
    assert stage_load(given, found).backward == pytest.approx(least)


def test_merak_recomputes_less_on_later_stages() -> None:
    cost = UnitCost(1.0, 1.0, 1.0, 1.0, weights=2.0, saved=4.0, saved_recompute=1.0)
    given = Problem(
        tuple(ChainUnit(f"layer {n}", {(1, 1): cost}) for n in range(24)),
        *(4, 12),
        memory=68.0,
        whole_samples=True,
    )
    plan = merak.plan(given)
    assert plan is not None
    flags = [sum(choice.recompute for choice in each.choices) for each in plan.stages]
    assert flags == sorted(flags, reverse=True)
    assert flags[0] > flags[-1]
    judged = judge(given, plan)
    assert judged.fits
    for in_flight, count, most in zip((4, 3, 2, 1), flags, judged.peaks, strict=True):
        one_layer = in_flight * (cost.saved - cost.saved_recompute) + cost.saved
        assert not count or most + one_layer > given.memory


def test_dawnpiper_finds_the_best_cut_of_two_stages() -> None:
    equal = 0
    for seed in range(30):
        given = Problem(random_units(9, seed), 2, 4, memory=50.0, whole_samples=True)
        found = dawnpiper.cut_in_two(given, Uniform(2, 1, 1))
        equal += found.slowest == pytest.approx(least_recomputed(given, 2))
    assert equal == 30


def test_dawnpiper_is_near_the_best_cuts_of_four_stages() -> None:
    gaps = []
    for seed in range(10):
        given = Problem(random_units(10, seed), 4, 6, memory=32.0, whole_samples=True)
        least = least_recomputed(given, 4)
        found = dawnpiper.cut_in_two(given, Uniform(4, 1, 1))
        if least < inf:
            gaps.append(found.slowest / least - 1)
    print("DawnPiper's gaps with four stages:", ", ".join(f"{gap:.1%}" for gap in gaps))
    assert len(gaps) > 5
    assert max(gaps) < 0.05


def least_recomputed(given: Problem, stages: int) -> float:
    """Return the least time of the slowest stage over all cuts, with the recomputation that each
    stage needs."""
    least = inf
    for ends in all_cuts(given.length, stages):
        slowest = 0.0
        for number, (first, last) in enumerate(pairwise(ends)):
            whole = stage(first, last, [number])
            made = cheapest_recomputation(given, whole, stages - 1 - number)
            slowest = max(slowest, inf if made is None else _seconds(given, made))
        least = min(least, slowest)
    return least


def _seconds(given: Problem, made: PlannedStage) -> float:
    load = stage_load(given, made)
    return load.forward + load.backward


def test_autopipe_balances_better_than_cuts_between_layers() -> None:
    embedding, head = UnitCost(0.1, 0.1, 0.2), UnitCost(0.8, 0.8, 0.8)
    attention, mlp = UnitCost(0.4, 0.4, 0.4), UnitCost(0.6, 0.6, 0.6)
    layers = [each for _ in range(9) for each in (attention, mlp)]
    costs = [embedding, *layers, head]
    given = Problem(
        tuple(ChainUnit(f"unit {n}", {(1, 1): each}) for n, each in enumerate(costs)),
        *(4, 8),
        cuts=tuple(range(1, 20, 2)),
        whole_samples=True,
    )
    own = autopipe.plan(given)
    assert own is not None
    by_layer = min(
        judge(given, one_device_each(given, ends)).seconds
        for ends in all_cuts(given.length, 4)
        if set(ends[1:-1]) <= set(given.block_cuts)
    )
    assert judge(given, own).seconds < by_layer
    loads = [_seconds(given, each) for each in own.stages]
    assert max(loads) / (sum(loads) / 4) < 1.06
    assert not set(own.cuts) <= set(given.block_cuts)


def test_pipe_torch_avoids_the_slow_link() -> None:
    slow = {(1, 2), (2, 1)}
    matrix = [[0.01 if (a, b) in slow else 5.0 for b in range(4)] for a in range(4)]
    given = Problem(random_units(5, 2), 4, 6, samples=1, links=Links(matrix=matrix))
    given = Problem(given.units, 4, 6, whole_samples=True, links=given.links)
    plan = pipe_torch.plan(given)
    assert plan is not None
    order = [each.devices[0] for each in plan.stages]
    assert not slow & set(pairwise(order))
    best = min(judge(given, each).seconds for each in _everywhere(given))
    gap = judge(given, plan).seconds / best - 1
    print(f"Pipe-Torch's gap to the best order: {gap:.2%}")
    assert gap < 0.05


def _everywhere(given: Problem) -> Iterator[PlannedPipeline]:
    """Yield pipelines of one device for each stage, in every order of devices."""
    for order in product(range(4), repeat=4):
        if len(set(order)) == 4:
            for ends in all_cuts(given.length, 4):
                spans = zip(pairwise(ends), order, strict=True)
                yield PlannedPipeline(tuple(stage(*span, [at]) for span, at in spans), 6)
