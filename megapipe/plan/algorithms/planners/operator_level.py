"""Operator-level planning: where and when each operation runs (She et al., 2503.09357).

The paper solves a mixed-integer program over operators, devices, times and memory, in two levels:
clusters of operators first, operations in the clusters then. Here the exact schedules of
:mod:`megapipe.plan.algorithms.operator_tasks` take the solver's place, which can be done for few
operations. For a chain of units, the first level places up to :data:`BLOCKS` blocks of units on two
pipeline ranks, by the shortest schedule of two micro-batches. The second level orders the
operations of all micro-batches: exactly if there are two, by greedy rules if there are more.
"""

from __future__ import annotations

from itertools import pairwise

from megapipe.plan.algorithms.judge import judge
from megapipe.plan.algorithms.operator_tasks import Task, TaskProblem, Timed, best_schedule
from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.planners.device_placement import DevicePlacement
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import Stages, Uniform, positions, uniform_shapes
from megapipe.schedule.ir import Kind, Schedule, pack, packed
from megapipe.schedule.placement import Placement

RANKS = 2
"""Maximum number of pipeline ranks."""
BLOCKS = 4
"""Maximum number of blocks."""
MICROBATCHES = 2
"""Maximum number of micro-batches of the first level."""


def block_ends(problem: Problem) -> list[int]:
    """Return the ends of blocks with nearly equal numbers of units, as indices of positions."""
    parts = len(positions(problem)) - 1
    count = min(BLOCKS, parts)
    return [index * parts // count for index in range(count + 1)]


def chain_tasks(problem: Problem, shape: Uniform) -> TaskProblem:
    """Return the forwards and backwards of a few micro-batches, each on a block of units. Every
    block is a group, because its weights are on one rank."""
    ends, stages = positions(problem), Stages(problem)
    spans = [(ends[first], ends[last]) for first, last in pairwise(block_ends(problem))]
    loads = [stages(*span, 0, shape.devices, shape.tp)[1] for span in spans]
    sent = [problem.cost(0, last, shape.tp, shape.replicas).message for _, last in spans]
    tasks: list[Task] = []
    for _ in range(min(MICROBATCHES, problem.microbatches)):
        for block, load in enumerate(loads):
            inputs = (len(tasks) - 1,) if block else ()
            tasks.append(Task(load.forward, inputs, sent[block], block))
        for block, load in reversed(list(enumerate(loads))):
            received = sent[block - 1] if block else 0.0
            tasks.append(Task(load.backward, (len(tasks) - 1,), received, block))

    def transfer(size: float, source: int, target: int) -> float:
        if source == target:
            return 0.0
        width, tp = shape.devices, shape.tp
        pair = [range(rank * width, (rank + 1) * width, tp) for rank in (source, target)]
        return problem.links.message(size, *pair)

    in_flight = min(problem.microbatches, shape.stages)
    sizes = [load.fixed + in_flight * load.saved for load in loads]
    return TaskProblem(tasks, shape.stages, sizes, problem.memory, transfer)


def exact_order(found: Timed, tasks: TaskProblem) -> Schedule:
    """Return the schedule of a chain's tasks, in which every block is a stage."""
    count = len(found.devices)
    row = [found.devices[block] for block in range(count)]
    used = list(dict.fromkeys(row))
    placement = Placement(len(used), (tuple(map(used.index, row)),))

    def op(task: int) -> int:
        microbatch, at = divmod(task, 2 * count)
        forward = at < count
        stage = at if forward else 2 * count - 1 - at
        return pack(Kind.F if forward else Kind.B, stage, microbatch)

    lists = [packed(map(op, found.order(tasks.tasks, device))) for device in used]
    microbatches = len(tasks.tasks) // (2 * count)
    return Schedule("operator_level", placement, microbatches, tuple(lists))


def pipeline(problem: Problem, shape: Uniform) -> PlannedPipeline | None:
    """Return the plan for a number of ranks; None if no placement fits."""
    tasks, ends = chain_tasks(problem, shape), block_ends(problem)
    found = best_schedule(tasks)
    if found is None:
        return None
    if len(tasks.tasks) == 2 * problem.microbatches * (len(ends) - 1):
        where, width = positions(problem), shape.devices
        stages = []
        for block, (first, last) in enumerate(pairwise(ends)):
            devices = range(found.devices[block] * width, (found.devices[block] + 1) * width)
            stages.append(stage(where[first], where[last], devices, shape.tp))
        order = exact_order(found, tasks)
        return PlannedPipeline(tuple(stages), problem.microbatches, order)
    sizes = [last - first for first, last in pairwise(ends)]
    ranks = [found.devices[block] for block, size in enumerate(sizes) for _ in range(size)]
    return DevicePlacement(problem, shape).plan(tuple(ranks))


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the fastest plan that fits, of pipelines with up to :data:`RANKS` ranks.
    :func:`~megapipe.plan.algorithms.operator_tasks.best_schedule` also plans graphs of operators
    that are no chain, which the trainer cannot run."""
    best: tuple[float, PlannedPipeline] | None = None
    for shape in uniform_shapes(problem, problem.tensor_sizes):
        found = pipeline(problem, shape) if shape.stages <= RANKS else None
        if found is not None:
            judged = judge(problem, found)
            if judged.fits and (best is None or judged.seconds < best[0]):
                best = judged.seconds, found
    return best and best[1]


ALGORITHMS = (
    Algorithm(
        "operator_level",
        "Operator-level planner (She et al., 2503.09357), at most two ranks; exact, no solver",
        "simulated step time",
        plan,
    ),
)
