"""Best order of a small search problem, proved to be the best by a constraint solver.

It serves to check :mod:`megapipe.schedule.search`. It is slow: some hundreds of operations are the
limit. It needs OR-Tools (:mod:`megapipe.schedule.search.solver`).
"""

from dataclasses import dataclass, replace

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement
from megapipe.schedule.search.blocks import Blocks, Starts
from megapipe.schedule.search.greedy import greedy, rules
from megapipe.schedule.search.instance import (
    Accounting,
    MemoryLimit,
    blocks_of,
    check_microbatches,
    instance,
)
from megapipe.schedule.search.problem import Objective, Problem
from megapipe.schedule.search.solver import add_blocks, new_model, solved
from megapipe.schedule.timing.simulate import simulate


@dataclass(frozen=True)
class Exact:
    """The result of the solver. Times are in the unit of the cost, as the simulator's are."""

    schedule: Schedule
    value: Time
    """Makespan or longest span of the schedule, whichever is the objective."""
    bound: Time
    """Lower bound of `value` over all orders with these kinds of backwards."""

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
    fused: bool = False,
    seconds: float = 60,
) -> Exact:
    """Find the shortest order, and a lower bound for all such orders.

    Args:
        placement: placement with one direction; stages may span all ranks.
        cost: times in whole numbers or fractions; gather and reduce must be 0. Jitter is ignored.
        objective: "makespan" or "span". "span" requires that each rank's first start is the same in
            every order. This is so if every stage before a rank's lowest stage is the lowest stage
            of another rank, as on loop, V and wave.
        fused: whether backwards are fused (B) instead of split (I and W).
        seconds: time limit of the solver.

    The other arguments are those of :func:`~megapipe.schedule.search.search`.

    Raises:
        ScheduleError: OR-Tools is missing, no order keeps the limit, or an argument is wrong.
    """
    model = new_model("exact")
    check_microbatches(microbatches)
    blocks = blocks_of(
        placement,
        cost,
        activation_limit=activation_limit,
        accounting=accounting,
        freed=freed,
        fused=fused,
    )
    if objective == "span" and not _starts_are_fixed(placement):
        raise ScheduleError(
            'exact: objective "span" needs a placement on which no rank can delay another one\'s '
            "first forward, such as loop, V or wave"
        )
    if placement.spanning:
        first = _one_by_one(blocks, microbatches)
    else:
        first = _greedy(
            instance(
                placement,
                microbatches,
                blocks.cost,
                activation_limit=activation_limit,
                accounting=accounting,
                freed=freed,
                objective=objective,
                fused=fused,
            )
        )
    starts = add_blocks(model, blocks, first)
    origins = [
        min(blocks.earliest[index] for index in own) if objective == "span" else 0
        for own in blocks.on
    ]
    value = model.new_int_var(0, sum(map(len, starts)) * blocks.serial, "")
    for own, origin in zip(blocks.on, origins, strict=True):
        for index in own:
            model.add(value >= starts[index][-1] + blocks.all[index].duration - origin)
    model.minimize(value)
    solution = solved(model, [start for own in starts for start in own], seconds)
    values = iter(solution.values or ())
    best = [[next(values) for _ in own] for own in first] if solution.values else first
    schedule = blocks.schedule("searched", best)
    timeline = simulate(schedule, replace(cost, jitter=0.0))
    reached = timeline.makespan if objective == "makespan" else max(timeline.spans)
    return Exact(schedule, reached, min(reached, blocks.time(solution.bound)))


def _starts_are_fixed(placement: Placement) -> bool:
    lowest = {placement.stages_of(rank)[0] for rank in range(placement.ranks)}
    return lowest == set(range(len(lowest)))


def _greedy(problem: Problem) -> Starts:
    """Return the best order of all greedy rules."""
    orders = (problem.timed(greedy(problem, rule)) for rule in rules(problem))
    best = min((timed for timed in orders if timed is not None), key=lambda timed: timed.value)
    run = problem.ends(best.order)
    assert run is not None  # it was timed
    m = problem.microbatches
    begins = [int(end - time) for end, time in zip(run[0], problem.duration, strict=False)]
    return [begins[stream : stream + m] for stream in range(0, problem.size, m)]


def _one_by_one(blocks: Blocks, microbatches: int) -> Starts:
    """Return the order in which one micro-batch follows the other."""
    return [
        [start + number * blocks.serial for number in range(microbatches)]
        for start in blocks.one_by_one
    ]
