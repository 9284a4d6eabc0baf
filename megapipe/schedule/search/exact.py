"""Best order of a small search problem, proved to be the best by a constraint solver.

It serves to check :mod:`megapipe.schedule.search`. It is slow: some hundreds of operations are the
limit. It needs OR-Tools (``pip install ortools``), which is imported when :func:`solve` is called.
"""

from dataclasses import dataclass
from typing import Any

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time, plain, ratio
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement
from megapipe.schedule.search.greedy import greedy, rules
from megapipe.schedule.search.instance import (
    Accounting,
    MemoryLimit,
    can_run,
    instance,
    least_limit,
)
from megapipe.schedule.search.problem import Objective, Problem, TimedOrder
from megapipe.schedule.timing.times import in_ticks


@dataclass(frozen=True)
class Exact:
    """The result of the solver. Times are in the unit of the cost, as the simulator's are."""

    schedule: Schedule
    value: Time
    """Makespan or longest span of the schedule, whichever is the objective."""
    bound: Time
    """Lower bound of `value` over all orders with split backwards."""

    @property
    def proved(self) -> bool:
        """Whether the schedule is proved to be the best one possible."""
        return self.value == self.bound


def solve(
    placement: Placement,
    microbatches: int,
    cost: Cost,
    *,
    activation_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    objective: Objective = "makespan",
    seconds: float = 60,
) -> Exact:
    """Find the shortest order with split backwards, and a lower bound for all such orders.

    Args:
        cost: times in whole numbers or fractions; gather and reduce must be 0. Jitter is ignored.
        objective: "makespan" or "span". "span" requires that each rank's first start is the same in
            every order. This is so if every stage before a rank's lowest stage is the lowest stage
            of another rank, as on loop, V and wave.
        seconds: time limit of the solver.

    The other arguments are those of :func:`~megapipe.schedule.search.search`.

    Raises:
        ScheduleError: OR-Tools is missing, no order keeps the limit, or an argument is wrong.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError("exact: it needs OR-Tools; pip install ortools") from None
    cost, scale = in_ticks(placement, cost)
    problem = instance(
        placement,
        microbatches,
        cost,
        activation_limit=activation_limit,
        accounting=accounting,
        freed=freed,
        objective=objective,
    )
    _check(problem)
    start = _first(problem)
    model = cp_model.CpModel()
    begins = _model(problem, model, start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.solve(model)
    best = start
    if solver.response_proto.solution:
        at = [(solver.value(begin), op) for op, begin in enumerate(begins)]
        order = [
            [op for _, op in sorted(entry for entry in at if problem.rank[entry[1]] == rank)]
            for rank in range(placement.ranks)
        ]
        solved = problem.timed(order)
        if solved is not None and solved.value < best.value:
            best = solved
    return Exact(
        problem.schedule(best.order),
        plain(ratio(best.value, scale)),
        plain(ratio(min(best.value, round(solver.best_objective_bound)), scale)),
    )


def _check(problem: Problem) -> None:
    if problem.cost.has_replicas(problem.stages):
        raise ScheduleError("exact: gathers and reductions must cost 0; they are not in the model")
    if any(isinstance(time, float) for time in problem.duration + problem.lag):
        raise ScheduleError("exact: costs must be whole numbers or fractions, not floats")
    if not can_run(problem):
        raise ScheduleError(
            "exact: activation_limit is too small; it must be at least "
            f"{least_limit(problem.placement)}, so that one micro-batch can pass all stages"
        )
    if problem.objective == "span" and not _starts_are_fixed(problem):
        raise ScheduleError(
            'exact: objective "span" needs a placement on which no rank can delay another one\'s '
            "first forward, such as loop, V or wave"
        )


def _starts_are_fixed(problem: Problem) -> bool:
    lowest = {chunks[0] for chunks in problem.chunks}
    return lowest == set(range(len(lowest)))


def _first(problem: Problem) -> TimedOrder:
    """Return the best order of all greedy rules; the solver begins with it."""
    orders = (problem.timed(greedy(problem, rule)) for rule in rules(problem))
    return min((timed for timed in orders if timed is not None), key=lambda timed: timed.value)


def _model(problem: Problem, model: Any, start: TimedOrder) -> list[Any]:
    """Add the problem to `model` with `start` as a hint; return the variables of the operations'
    start times."""
    run = problem.ends(start.order)
    assert run is not None  # it was timed
    ends, m = run[0], problem.microbatches
    offsets = problem.offsets(start.order, ends)
    horizon = int(start.value + max(offsets))
    duration = [int(time) for time in problem.duration]
    begins = [model.new_int_var(0, horizon, "") for _ in duration]
    busy: list[list[Any]] = [[] for _ in problem.chunks]
    alive: list[list[tuple[Any, int]]] = [[] for _ in problem.chunks]
    for op, begin in enumerate(begins):
        model.add_hint(begin, int(ends[op]) - duration[op])
        busy[problem.rank[op]].append(model.new_fixed_size_interval_var(begin, duration[op], ""))
        before = [op - 1] if op % m else []
        if problem.needs[op] < problem.size:
            before.append(problem.needs[op])
        if op >= 2 * problem.row:
            before.append(op - problem.row)
        for other in before:
            lag = int(problem.lag[op]) if other == problem.needs[op] else 0
            model.add(begin >= begins[other] + duration[other] + lag)
        if problem.amount[op] < 0:
            lifetime = model.new_int_var(0, horizon, "")
            forward, end = begins[op % problem.row], begin + duration[op]
            interval = model.new_interval_var(forward, lifetime, end, "")
            alive[problem.rank[op]].append((interval, -problem.amount[op]))
    value = model.new_int_var(0, horizon, "")
    for rank, room in enumerate(problem.room):
        model.add_no_overlap(busy[rank])
        intervals, amounts = zip(*alive[rank], strict=True)
        model.add_cumulative(intervals, amounts, room)
        for op in range(problem.size):
            if problem.rank[op] == rank and op % m == m - 1:
                model.add(value >= begins[op] + duration[op] - int(offsets[rank]))
    model.minimize(value)
    return begins
