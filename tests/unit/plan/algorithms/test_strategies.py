"""Strategies of operators: TensorOpt, Alpa's inner problem and AutoDDL against brute force."""

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.matmuls import (
    ELEMENTWISE,
    REPLICATED,
    MeshOperator,
    boxing,
    convert,
    matmul,
    strategy_graph,
)
from megapipe.plan.algorithms.planners import alpa_inner, autoddl, tensoropt
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.strategies import StrategyGraph, as_plan, of_chain
from tests.unit.plan.algorithms.random_chains import SLOW, random_units


def chain(units: int, seed: int, memory: float = 1e9) -> Problem:
    return Problem(random_units(units, seed, (1, 2, 4)), 4, 3, samples=4, memory=memory, links=SLOW)


def small_chain(seed: int) -> StrategyGraph:
    """Make six operators, each with four strategies."""
    problem = Problem(random_units(6, seed, (1, 2)), 2, 3, samples=2, links=SLOW)
    return of_chain(problem, recompute=True)


def test_costs_of_strategies_are_those_of_the_judge() -> None:
    problem, random = chain(4, 0), Random(0)
    graph = of_chain(problem, recompute=True)
    for _ in range(20):
        chosen = tuple(random.choice(own) for own in graph.options)
        plan = as_plan(problem, chosen, recompute=True)
        assert plan is not None
        judged = judge(problem, plan)
        assert judged.seconds == pytest.approx(graph.cost(chosen))
        assert judged.peaks[0] == pytest.approx(graph.memory(chosen))


@pytest.mark.parametrize("seed", range(2))
def test_the_frontier_of_tensoropt_is_that_of_brute_force(seed: int) -> None:
    graph = small_chain(seed)
    every = sorted(
        (graph.cost(chosen), graph.memory(chosen)) for chosen in itertools.product(*graph.options)
    )
    expected: list[tuple[float, float]] = []
    for seconds, size in every:
        if not expected or size < expected[-1][1] * (1 - 1e-9):
            expected.append((seconds, size))
    found = tensoropt.frontier(graph)
    assert len(found) > 5
    assert [each.seconds for each in found] == pytest.approx([each[0] for each in expected])
    assert [each.bytes for each in found] == pytest.approx([each[1] for each in expected])
    for each in found:
        assert graph.cost(each.chosen) == pytest.approx(each.seconds)


def test_a_thinned_frontier_is_a_part_of_the_whole_with_both_ends() -> None:
    graph = small_chain(0)
    whole, part = tensoropt.frontier(graph), tensoropt.frontier(graph, points=4)
    assert part[0].seconds == pytest.approx(whole[0].seconds)
    assert min(each.bytes for each in part) == pytest.approx(whole[-1].bytes)


def test_tensoropt_plans_the_fastest_choice_that_fits() -> None:
    graph = of_chain(chain(4, 1), recompute=True)
    whole = tensoropt.frontier(graph)
    for wanted in (whole[0], whole[len(whole) // 2], whole[-1]):
        problem = chain(4, 1, wanted.bytes * (1 + 1e-9))
        plan = tensoropt.plan(problem)
        assert plan is not None
        judged = judge(problem, plan)
        assert judged.fits
        assert judged.seconds == pytest.approx(wanted.seconds)
    assert tensoropt.plan(chain(4, 1, whole[-1].bytes * 0.99)) is None


def test_planners_of_one_stage_agree_without_a_limit_of_memory() -> None:
    problem = chain(6, 3)
    plans = [module.plan(problem) for module in (tensoropt, alpa_inner, autoddl)]
    seconds = [judge(problem, plan).seconds for plan in plans if plan is not None]
    assert seconds == pytest.approx([seconds[0]] * 3)
    tight = replace(problem, memory=1)
    assert [module.plan(tight) for module in (tensoropt, alpa_inner, autoddl)] == [None] * 3


def test_no_strategy_means_no_plan() -> None:
    """Three devices cannot share two samples."""
    problem = Problem(random_units(3, 0), 3, 2, samples=2, whole_samples=True)
    assert [module.plan(problem) for module in (tensoropt, alpa_inner, autoddl)] == [None] * 3


def mlp(rows: int, hidden: int) -> list[MeshOperator]:
    """Make the MLP of a transformer block between replicated activations."""
    return [
        MeshOperator(REPLICATED, rows, hidden),
        matmul(rows, hidden, 4 * hidden, 0),
        MeshOperator(ELEMENTWISE, rows, 4 * hidden, 0, (1,)),
        matmul(rows, 4 * hidden, hidden, 2),
        MeshOperator(REPLICATED, rows, hidden, 0, (3,)),
    ]


def test_alpa_splits_an_mlp_by_columns_then_by_rows() -> None:
    """Megatron-LM's split: one all-reduce in the forward, one in the backward."""
    graph = strategy_graph(mlp(512, 1024), [4])
    bytes_, chosen = alpa_inner.best_strategies(graph)
    assert graph.names(chosen)[1:4] == ["columns", "S1", "inner"]
    assert bytes_ == 2 * (2 * 3 / 4) * (2 * 512 * 1024)
    assert bytes_ == min(map(graph.cost, itertools.product(*graph.options)))


def test_alpa_splits_the_samples_if_activations_are_larger_than_weights() -> None:
    graph = strategy_graph(mlp(65536, 256), [4])
    _, chosen = alpa_inner.best_strategies(graph)
    assert graph.names(chosen)[1:4] == ["rows", "S0", "rows"]


def test_a_graph_with_branches_is_solved_as_by_brute_force() -> None:
    random = Random(1)
    for _ in range(5):
        rows, wide = random.choice([64, 4096]), random.choice([256, 2048])
        block = [
            MeshOperator(REPLICATED, rows, 512),
            matmul(rows, 512, wide, 0),
            matmul(rows, 512, wide, 0),
            MeshOperator(ELEMENTWISE, rows, wide, 0, (1, 2)),
            matmul(rows, wide, 512, 3),
            MeshOperator(ELEMENTWISE, rows, 512, 0, (0, 4)),
        ]
        graph = strategy_graph(block, [4])
        least = min(map(graph.cost, itertools.product(*graph.options)))
        assert alpa_inner.best_strategies(graph)[0] == least


def test_bytes_of_conversions() -> None:
    """A ring of 4 sends 3/4 of a tensor per pass, an all-to-all 3/4 of what a device has."""
    assert boxing(16, "P", "B", 4) == 24
    assert boxing(16, "P", "S0", 4) == boxing(16, "S1", "B", 4) == 12
    assert boxing(16, "S0", "S1", 4) == 3
    assert boxing(16, "B", "S1", 4) == boxing(16, "S0", "S0", 4) == 0
    assert convert(16, ["S0", "P"], ["S0", "B"], [2, 2]) == 8
    assert convert(16, ["S0", "S1"], ["B", "B"], [2, 2]) == 4 + 8


@pytest.mark.parametrize("seed", range(5))
def test_autoddl_reaches_the_bytes_of_brute_force_on_a_mesh(seed: int) -> None:
    random = Random(seed)
    rows, widths = random.choice([256, 8192]), [256 << random.randrange(5) for _ in range(7)]
    operators = [matmul(rows, widths[i], widths[i + 1], *([i - 1] if i else [])) for i in range(6)]
    graph = strategy_graph(operators, [2, 2])
    total = np.zeros((9,) * 6)
    for node, own in enumerate(graph.strategies):
        total += np.array([each.cost for each in own]).reshape([9] + [1] * (5 - node))
    for (_, node), matrix in graph.edges.items():
        total += np.array(matrix).reshape([9, 9] + [1] * (5 - node))
    found = autoddl.descend_by_operator(graph)
    assert found.least == total.min() == alpa_inner.best_strategies(graph)[0]
    assert found.trace == sorted(found.trace, reverse=True)
