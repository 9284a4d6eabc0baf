"""FlexFlow: a random walk over strategies of operators, timed by delta simulation (Jia et al.,
1807.05358).

Of the dimensions Sample, Operator, Attribute and Parameter, an operator is split over samples
(replicas) and parameters (tensor parallelism), and different operators can be on different
devices. Attributes, such as positions of a sequence, are not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from megapipe.plan.algorithms.local_search import Trials, anneal
from megapipe.plan.algorithms.pipeline import PlannedPipeline
from megapipe.plan.algorithms.problem import Links, Operator, Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.strategies import as_plan, of_chain, unit_choices
from megapipe.plan.algorithms.task_graph import Seconds, Simulator, Split, Strategy

STEPS = 3000
"""Number of proposals of a walk."""
MOST_TASKS = 300_000
"""Maximum number of tasks of all proposals together."""
TEMPERATURE = 0.02
"""Temperature as a fraction of the time of the first strategy."""


def changed(strategy: Strategy, options: Sequence[Sequence[Split]], rng: Random) -> Strategy:
    """Return the strategy with a random operator split in a random way."""
    node = rng.randrange(len(strategy))
    return (*strategy[:node], rng.choice(options[node]), *strategy[node + 1 :])


def walk(
    graph: Sequence[Operator],
    seconds: Seconds,
    links: Links,
    options: Sequence[Sequence[Split]],
    *,
    steps: int = STEPS,
    seed: int = 0,
) -> Trials[Strategy]:
    """Walk from the first option of each operator and return the trials with the best strategy."""
    rng, simulator = Random(seed), Simulator(graph, seconds, links)
    trials = Trials(simulator.time, steps + 1)
    start = tuple(own[0] for own in options)
    anneal(
        trials,
        start,
        lambda strategy: changed(strategy, options, rng),
        rng,
        temperature=TEMPERATURE * trials(start),
        steps=steps,
    )
    return trials


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the plan of a single stage on all devices: each unit's tensor-parallel degree. The
    walk begins with the best degree for all units. Plans with units on different devices, which
    :func:`walk` also finds, are no pipelines."""
    costs, choices = of_chain(problem), unit_choices(problem, recompute=False)
    number = {Split(tuple(range(problem.devices)), each.tp): n for n, each in enumerate(choices)}
    if not number:
        return None

    def seconds(node: int, split: Split) -> float:
        return costs.strategies[node][number[split]].cost

    def equal(split: Split) -> float:
        return sum(seconds(node, split) for node in range(problem.length))

    graph = [
        replace(each, output=2 * problem.microbatches * each.output)
        for each in replace(problem, operators=()).graph
    ]
    options = [sorted(number, key=equal)] * problem.length
    tasks = problem.length * problem.devices
    found = walk(graph, seconds, problem.links, options, steps=min(STEPS, MOST_TASKS // tasks))
    assert found.best is not None
    chosen = tuple(number[split] for split in found.best)
    return as_plan(problem, chosen) if costs.memory(chosen) <= problem.memory else None


ALGORITHMS = (
    Algorithm("flexflow", "FlexFlow (Jia et al., 1807.05358)", "time of one stage", plan),
)
