"""The best order of a small instance, proved by a constraint solver.

A referee for :mod:`megapipe.schedule.search`; needs OR-Tools (``pip install ortools``).
"""

from dataclasses import dataclass
from fractions import Fraction

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Time, plain
from megapipe.schedule.ir import Schedule
from megapipe.schedule.search.problem import Order, Problem


@dataclass(frozen=True)
class Exact:
    """What the solver found out."""

    schedule: Schedule
    value: Time
    """The objective of the schedule, as the simulator gives it."""
    bound: Time
    """No order is shorter; equal to value where the schedule is proved to be optimal."""


def solve(
    problem: Problem, *, seconds: float = 60, hint: Order | None = None, workers: int = 1
) -> Exact:
    """Find the shortest order of an instance with whole or fractional costs."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError("exact: it needs OR-Tools; pip install ortools") from None
    model = cp_model.CpModel()
    ranks = problem.placement.ranks
    horizon = int(sum(problem.duration) + sum(problem.lag))
    if hint is not None:
        ends, _ = problem.ends(hint)
        horizon = (
            int(problem.value(hint, ends))
            + sum(problem.lag[: problem.stages * problem.microbatches : problem.microbatches])
            + sum(problem.duration[: problem.stages * problem.microbatches : problem.microbatches])
        )
    starts = [model.new_int_var(0, horizon, "") for _ in range(problem.size)]
    m = problem.microbatches
    row = problem.stages * m
    by_rank = [[] for _ in range(ranks)]
    held = [[] for _ in range(ranks)]
    for op, start in enumerate(starts):
        d = problem.duration[op]
        by_rank[problem.rank[op]].append(model.new_fixed_size_interval_var(start, d, ""))
        need = problem.needs[op]
        if need < problem.size:
            model.add(start >= starts[need] + problem.duration[need] + problem.lag[op])
        if op >= 2 * row:
            model.add(start >= starts[op - row] + problem.duration[op - row])
        if op % m:
            model.add(start >= starts[op - 1] + problem.duration[op - 1])
        if op >= row and problem.amount[op]:
            forward = op % row
            size = model.new_int_var(0, horizon, "")
            held[problem.rank[op]].append(
                (model.new_interval_var(starts[forward], size, start + d, ""), -problem.amount[op])
            )
    for rank in range(ranks):
        model.add_no_overlap(by_rank[rank])
        if sum(d for _, d in held[rank]) > problem.room[rank]:
            model.add_cumulative(
                [i for i, _ in held[rank]], [d for _, d in held[rank]], problem.room[rank]
            )
    value = model.new_int_var(0, horizon, "value")
    first = [0] * ranks
    if problem.objective == "span":
        chain = 0
        for stage in range(problem.stages):
            op = stage * m
            chain += problem.lag[op]
            r = problem.rank[op]
            if stage == problem.placement.stages_of(r)[0]:
                first[r] = chain
            chain += problem.duration[op]
    for op, start in enumerate(starts):
        if op % m == m - 1 and op >= size_from(problem):
            model.add(value >= start + problem.duration[op] - first[problem.rank[op]])
    model.minimize(value)
    if hint is not None:
        for op in range(problem.size):
            model.add_hint(starts[op], ends[op] - problem.duration[op])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    at = [solver.value(start) for start in starts]
    order = [
        sorted(
            (op for op in range(problem.size) if problem.rank[op] == rank), key=lambda op: at[op]
        )
        for rank in range(ranks)
    ]
    return solver.status_name(status), order, solver.objective_value, solver.best_objective_bound


def size_from(problem):
    return problem.size - problem.stages * problem.microbatches
