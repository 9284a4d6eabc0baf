"""The constraint solver CP-SAT of OR-Tools, which is not among megapipe's requirements."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.search.blocks import Blocks, Starts

Model = Any
"""A ``CpModel``: OR-Tools has no types."""
Variable = Any


def new_model(what: str) -> Model:
    """Return an empty model. `what` needs it, and is named if OR-Tools is missing.

    Raises:
        ScheduleError: OR-Tools is missing.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ScheduleError(
            f"{what}: it needs OR-Tools; pip install 'megapipe[exact]', or ortools"
        ) from None
    return cp_model.CpModel()


class Solution(NamedTuple):
    """The solver's answer within its time limit."""

    values: list[int] | None
    """Values of the requested variables; None: no solution was found."""
    bound: int
    """Lower bound of the objective."""
    decided: bool
    """Whether the solution is proved to be the best, or proved not to exist."""


def solved(model: Model, wanted: list[Variable], seconds: float) -> Solution:
    """Solve a model and return the values of the variables `wanted`.

    One thread and a fixed seed: equal models give equal solutions, unless the time ends. Ctrl-C
    stops the solver and raises KeyboardInterrupt. The solver's own handler of SIGINT is not
    installed: it goes on with what it has, and leaves a handler that kills the process.
    """
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as thread:  # Python handles signals only outside of C++
        solving = thread.submit(solver.solve, model)
        try:
            status = solving.result()
        finally:
            solver.stop_search()
    found = [solver.value(each) for each in wanted] if solver.response_proto.solution else None
    decided = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return Solution(found, round(solver.best_objective_bound), decided)


def add_blocks(model: Model, blocks: Blocks, hint: Starts) -> list[list[Variable]]:
    """Add the blocks of all micro-batches to a model; return their starts, as
    variables[block][microbatch].

    Each block runs in micro-batch order, which loses nothing as all micro-batches cost the same.
    `hint` is a schedule for the solver to begin with; no block has to start later than all of it.
    """
    horizon = ends(blocks, hint)
    starts = [[model.new_int_var(0, horizon, "") for _ in own] for own in hint]
    busy: list[list[Variable]] = [[] for _ in blocks.on]
    for block, own, hinted in zip(blocks.all, starts, hint, strict=True):
        for number, start in enumerate(own):
            model.add_hint(start, hinted[number])
            if number:
                model.add(start >= own[number - 1] + block.duration)
            interval = model.new_fixed_size_interval_var(start, block.duration, "")
            for rank in block.ranks:
                busy[rank].append(interval)
    for intervals in busy:
        model.add_no_overlap(intervals)
    for before, after, lag in blocks.needs:
        for first, second in zip(starts[before], starts[after], strict=True):
            model.add(second >= first + blocks.all[before].duration + lag)
    if blocks.room is not None:
        _add_memory(model, blocks, starts, horizon, blocks.room)
    return starts


def ends(blocks: Blocks, starts: Starts) -> int:
    """Return the end of a schedule."""
    return max(own[-1] + block.duration for block, own in zip(blocks.all, starts, strict=True))


def _add_memory(
    model: Model, blocks: Blocks, starts: list[list[Variable]], horizon: int, room: list[int]
) -> None:
    alive: list[list[tuple[Variable, int]]] = [[] for _ in blocks.on]
    for forward, freeing in blocks.kept:
        block = blocks.all[freeing]
        for begin, end in zip(starts[forward], starts[freeing], strict=True):
            length = model.new_int_var(0, horizon, "")
            interval = model.new_interval_var(begin, length, end + block.duration, "")
            for rank in block.ranks:
                alive[rank].append((interval, -block.amount))
    for own, most in zip(alive, room, strict=True):
        intervals, amounts = zip(*own, strict=True)
        model.add_cumulative(intervals, amounts, most)
