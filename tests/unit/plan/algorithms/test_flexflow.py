"""FlexFlow: the delta simulation equals the full one; the walk finds good strategies."""

import itertools
from random import Random

import pytest

from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.planners import alpa_inner, flexflow
from megapipe.plan.algorithms.problem import Links, Operator, Problem
from megapipe.plan.algorithms.task_graph import Simulator, Split
from tests.unit.plan.algorithms.random_chains import SLOW, random_inputs, random_units

LINKS = Links(inside=3.0, between=1.0, per_node=2, latency=0.01)
SPLITS = [
    Split(devices, tp)
    for count in (1, 2, 4)
    for devices in itertools.permutations(range(4), count)
    for tp in (1, 2, 4)
    if count % tp == 0
]


def graph_of(random: Random, count: int) -> list[Operator]:
    return [
        Operator(f"op {node}", random.uniform(0.5, 2), 0, 0, random.uniform(0.5, 4), inputs)
        for node, inputs in enumerate(random_inputs(count, random))
    ]


def simulator(graph: list[Operator]) -> Simulator:
    return Simulator(graph, lambda node, split: graph[node].forward / len(split.devices), LINKS)


@pytest.mark.parametrize("seed", range(4))
def test_delta_simulation_equals_full_simulation(seed: int) -> None:
    """1000 moves over the four graphs; the times are equal bit by bit."""
    random = Random(seed)
    graph = graph_of(random, 8 + seed)
    delta, all_tasks = simulator(graph), 0
    strategy = tuple(random.choice(SPLITS) for _ in graph)
    for _ in range(250):
        strategy = flexflow.changed(strategy, [SPLITS] * len(graph), random)
        full = simulator(graph)
        assert delta.time(strategy) == full.time(strategy)
        all_tasks += full.simulated
    assert delta.simulated < 0.75 * all_tasks


def test_times_by_hand() -> None:
    """Two rows of the first operator's output go to each replica of the second one."""
    graph = [Operator("a", 4, 0, 0, 8.0), Operator("b", 2, 0, 0, 1.0, (0,))]
    links = Links(inside=2.0)
    both = Simulator(graph, lambda node, split: graph[node].forward / len(split.devices), links)
    apart = (Split((0,)), Split((1,)))
    assert both.time(apart) == 4 + 8 / 2 + 2
    assert both.time((Split((0,)), Split((0,)))) == 4 + 2
    assert both.time((Split((0, 1)), Split((0, 1)))) == 2 + 1
    assert both.time((Split((0, 1), 2), Split((0, 1)))) == 2 + 8 / 2 / 2 / 2 + 1
    assert both.time((Split((0,)), Split((0, 1)))) == 4 + 8 / 2 / 2 + 1


def test_the_walk_finds_the_best_strategy_of_a_small_graph() -> None:
    random = Random(5)
    graph = graph_of(random, 3)
    options = [Split((0,)), Split((1,)), Split((0, 1)), Split((0, 1), 2)]
    seconds = lambda node, split: graph[node].forward / len(split.devices)  # noqa: E731
    found = flexflow.walk(graph, seconds, LINKS, [options] * 3, steps=400)
    every = itertools.product(options, repeat=3)
    assert found.least == min(simulator(graph).time(strategy) for strategy in every)


def test_a_chain_gets_tensor_parallelism_by_unit() -> None:
    problem = Problem(random_units(5, 1, (1, 2, 4)), 4, 4, samples=4, links=SLOW)
    found, optimum = flexflow.plan(problem), alpa_inner.plan(problem)
    assert found is not None
    assert optimum is not None
    best = judge(problem, optimum).seconds
    print(f"FlexFlow: {judge(problem, found).seconds / best - 1:+.2%} of the optimum")
    assert best <= judge(problem, found).seconds <= 1.02 * best
