"""The core of ideals; Tarnawski's planner and the operator-level planner against brute force."""

import itertools
from random import Random

import pytest

from megapipe.errors import ConfigError
from megapipe.plan.algorithms.ideals import Ideals, cut_in_parts, members
from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.operator_tasks import Task, TaskProblem, Timed, best_schedule
from megapipe.plan.algorithms.planners import operator_level, tarnawski
from megapipe.plan.algorithms.problem import ChainUnit, Links, Operator, Problem
from megapipe.plan.algorithms.stages import Uniform
from megapipe.schedule.proof.validate import validate
from tests.unit.plan.algorithms.random_chains import (
    SLOW,
    all_cuts,
    one_device_each,
    random_inputs,
    random_units,
)

DIAMOND = [(), (0,), (0,), (1, 2)]


def test_ideals_of_a_diamond_a_chain_and_nothing() -> None:
    assert [members(ideal) for ideal in Ideals(DIAMOND).all] == [
        [],
        [0],
        [0, 1],
        [0, 2],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]
    assert len(Ideals([(), (0,), (1,), (2,)]).all) == 5
    assert len(Ideals([()] * 6).all) == 64


def test_graphs_that_cannot_be_planned() -> None:
    with pytest.raises(ConfigError, match="operator 1 has the inputs 2: expected numbers from 0"):
        Ideals([(), (2,), ()])
    with pytest.raises(ConfigError, match="20 operators has more than 20000 ideals"):
        Ideals([()] * 20)


def test_a_diamond_is_cut_along_its_branches() -> None:
    times = [1, 5, 5, 1]

    def cost(before: int, after: int, part: int) -> float:
        return sum(times[node] for node in members(after & ~before))

    found = cut_in_parts(Ideals(DIAMOND), 2, cost)
    assert found is not None
    assert found[0] == 6
    assert cut_in_parts(Ideals(DIAMOND), 1, cost) == (12, (15,))
    assert cut_in_parts(Ideals(DIAMOND), 9, lambda *_: None) is None


@pytest.mark.parametrize(("size", "devices"), [(6, 4), (8, 3), (9, 3), (10, 2), (11, 2), (12, 2)])
@pytest.mark.parametrize("room", [9.0, 1.3])
def test_parts_of_a_graph_are_those_of_brute_force(size: int, devices: int, room: float) -> None:
    random = Random(size)
    graph = [
        Operator(
            *(f"op {node}", random.uniform(0.5, 2), random.uniform(1, 3)),
            *(random.uniform(1, 2), random.uniform(0.2, 1), inputs),
        )
        for node, inputs in enumerate(random_inputs(size, random))
    ]
    memory = room * sum(each.memory for each in graph) / devices
    loads = []
    for device in itertools.product(range(devices), repeat=size):
        if all(device[u] <= device[v] for v in range(size) for u in graph[v].inputs):
            own = [[v for v in range(size) if device[v] == d] for d in range(devices)]
            if all(sum(graph[v].memory for v in part) <= memory for part in own):
                bits = [sum(1 << v for v in part) for part in own]
                loads.append(max(tarnawski.load(graph, part, 2.0) for part in bits if part))
    found = tarnawski.best_parts(graph, devices, memory, 2.0)
    assert found is not None
    assert found[0] == pytest.approx(min(loads))
    assert sum(found[1]) == 2**size - 1


def test_the_load_of_a_device_has_each_message_once() -> None:
    graph = [
        Operator("a", 1, 2, output=4),
        Operator("b", 3, 4, output=6, inputs=(0,)),
        Operator("c", 5, 6, output=8, inputs=(0,)),
        Operator("d", 7, 8, inputs=(1, 2)),
    ]
    assert tarnawski.load(graph, 0b0001, 2.0) == 3 + 2 * 4 / 2
    assert tarnawski.load(graph, 0b0110, 2.0) == 18 + 2 * (4 + 6 + 8) / 2
    assert tarnawski.load(graph, 0b1111, 2.0) == 36


def test_a_chain_is_cut_where_the_slowest_stage_is_fastest() -> None:
    problem = Problem(random_units(8, 2), 3, 40, memory=40, links=Links())
    plan = tarnawski.pipeline(problem, Uniform(3, 1, 1))
    assert plan is not None
    assert judge(problem, plan).fits
    plans = [one_device_each(problem, ends) for ends in all_cuts(8, 3)]
    fitting = [each for each in (judge(problem, plan) for plan in plans) if each.fits]
    slowest = min(max(each.timeline.busy) for each in fitting)
    assert max(judge(problem, plan).timeline.busy) == pytest.approx(slowest)
    best = tarnawski.plan(problem)
    assert best is not None
    assert judge(problem, best).seconds <= judge(problem, plan).seconds
    assert tarnawski.plan(Problem(random_units(8, 2), 3, 4, memory=2)) is None


def test_messages_count_where_a_chain_is_cut() -> None:
    """The load of the chain's operators on one device each is that of the graph."""
    units = [
        ChainUnit(each.name, {key: cost._replace(gradients=0) for key, cost in each.costs.items()})
        for each in random_units(8, 2)
    ]
    problem = Problem(tuple(units), 3, 4, links=Links(inside=0.05))
    plan = tarnawski.pipeline(problem, Uniform(3, 1, 1))
    found = tarnawski.best_parts(problem.graph, 3, bandwidth=0.05)
    assert plan is not None
    assert found is not None
    parts = [sum(1 << unit for unit in range(each.first, each.last)) for each in plan.stages]
    loads = [tarnawski.load(problem.graph, part, 0.05) for part in parts]
    assert max(loads) == pytest.approx(found[0])


def shortest_by_brute_force(problem: TaskProblem) -> float:
    """Return the least makespan of all orders and devices."""
    best, nothing = [float("inf")], (0.0,) * problem.devices

    def visit(timed: Timed, done: frozenset[int]) -> None:
        if len(done) == len(problem.tasks):
            best[0] = min(best[0], timed.makespan)
        for task, own in enumerate(problem.tasks):
            if task not in done and done.issuperset(own.inputs):
                for device in range(problem.devices):
                    longer = problem.add(timed, task, device)
                    if longer is not None and longer.makespan < best[0]:
                        visit(longer, done | {task})

    visit(Timed({}, {}, nothing, nothing), frozenset())
    return best[0]


@pytest.mark.parametrize(("size", "seed"), [(5, 0), (6, 1), (7, 2), (7, 3), (8, 4), (8, 5)])
def test_schedules_of_operators_are_those_of_brute_force(size: int, seed: int) -> None:
    """Up to eight operators on two devices with messages and too little memory for all on one."""
    random = Random(seed)
    tasks = [
        Task(
            random.uniform(0.5, 2), inputs, random.uniform(0.1, 1), node if seed % 2 else node // 2
        )
        for node, inputs in enumerate(random_inputs(size, random, back=3))
    ]
    sizes = [random.uniform(1, 2) for _ in tasks]
    groups = len({each.group for each in tasks})
    problem = TaskProblem(tasks, 2, sizes, 1.0 * groups, lambda size, a, b: size * (a != b))
    found = best_schedule(problem)
    assert found is not None
    assert found.makespan == pytest.approx(shortest_by_brute_force(problem))
    check_schedule(problem, found)


def check_schedule(problem: TaskProblem, found: Timed) -> None:
    """Check from the times alone that a schedule can be run."""
    device_of = [found.devices[task.group] for task in problem.tasks]
    starts = [found.ends[number] - task.seconds for number, task in enumerate(problem.tasks)]
    for number, task in enumerate(problem.tasks):
        for each in task.inputs:
            size = problem.tasks[each].output
            sent = problem.transfer(size, device_of[each], device_of[number])
            assert starts[number] >= found.ends[each] + sent - 1e-9
    for device in range(problem.devices):
        order = found.order(problem.tasks, device)
        for before, after in itertools.pairwise(order):
            assert starts[after] >= found.ends[before] - 1e-9
    for device in range(problem.devices):
        held = [problem.sizes[group] for group, at in found.devices.items() if at == device]
        assert sum(held) <= problem.memory


def test_what_does_not_fit_has_no_schedule() -> None:
    assert best_schedule(TaskProblem([Task(1.0), Task(1.0, group=1)], 1, [2, 2], 3)) is None


def test_the_exact_order_of_two_micro_batches_is_a_valid_schedule() -> None:
    units = [
        ChainUnit(each.name, {key: cost._replace(gradients=0) for key, cost in each.costs.items()})
        for each in random_units(4, 3)
    ]
    problem = Problem(tuple(units), 2, 2, links=Links(inside=3.0))
    tasks = operator_level.chain_tasks(problem, Uniform(2, 1, 1))
    found = best_schedule(tasks)
    plan = operator_level.pipeline(problem, Uniform(2, 1, 1))
    assert found is not None
    assert plan is not None
    judged = judge(problem, plan)
    validate(judged.timeline.schedule)
    assert judged.seconds == pytest.approx(found.makespan)
    cuts = [judge(problem, one_device_each(problem, ends)).seconds for ends in all_cuts(4, 2)]
    print(f"operator level: {judged.seconds / min(cuts) - 1:+.1%} of the best cut with 1F1B")
    assert judged.seconds < min(cuts)


def test_many_micro_batches_are_ordered_by_rules() -> None:
    problem = Problem(random_units(6, 1), 2, 5, memory=60, links=SLOW)
    plan = operator_level.plan(problem)
    assert plan is not None
    judged = judge(problem, plan)
    assert judged.fits
    validate(judged.timeline.schedule)
    assert operator_level.plan(Problem(random_units(6, 1), 2, 5, memory=3)) is None
