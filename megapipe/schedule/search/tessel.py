"""Search for a schedule with a repetend, on any placement with one direction (Tessel, 2311.15269).

1. The shortest period of a repetend is searched by a constraint solver, with more and more
   micro-batches in flight, until the busiest rank is never idle in the steady state.
2. The solver completes the warm-up and the drain.

The effort does not depend on the number of micro-batches. Both steps need OR-Tools
(:mod:`megapipe.schedule.search.solver`).
"""

from dataclasses import dataclass, replace
from time import monotonic

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement
from megapipe.schedule.search.blocks import Blocks
from megapipe.schedule.search.bound import cheapest
from megapipe.schedule.search.completion import completed
from megapipe.schedule.search.instance import (
    Accounting,
    MemoryLimit,
    blocks_of,
    check_microbatches,
)
from megapipe.schedule.search.repetend import Decision, of_period, one_by_one, shorter
from megapipe.schedule.timing.simulate import simulate

CALLS = 15
"""Number of calls of the solver, each with its share of the time, in the search for a repetend; if
they need less time, there are more calls."""


@dataclass(frozen=True)
class RepetendSearch:
    """The result of a search for a repetend. Times are in the unit of the cost."""

    schedule: Schedule
    value: Time
    """Makespan of the schedule."""
    lower_bound: Time
    """Lower bound of `value` for all schedules on the placement; it can be unreachable."""
    period: Time
    """Time between iterations in the steady state."""
    in_flight: int
    """Number of micro-batches that the repetend has in flight."""
    proved: bool
    """Whether no repetend with at most `in_flight` micro-batches in flight has a shorter period."""


def search_repetend(
    placement: Placement,
    microbatches: int,
    cost: Cost,
    *,
    activation_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    seconds: float = 60,
) -> RepetendSearch:
    """Find a repetend of minimal period and complete it to the schedule with the least makespan.

    Backwards are split, or fused if B is shorter than I + W on any stage and that is better.

    Args:
        placement: placement with one direction; stages may span all ranks.
        cost: times in whole numbers or fractions; gather and reduce must be 0. Jitter is ignored.
        seconds: time limit, half of it for each step. If a step reaches it, the result depends on
            the speed of the machine.

    The other arguments are those of :func:`~megapipe.schedule.search.search`.

    Raises:
        ScheduleError: OR-Tools is missing, no order keeps the limit, all operations take no time,
            or an argument is wrong.
    """
    check_microbatches(microbatches)
    cost = replace(cost, jitter=0.0)

    def blocks_at(cost: Cost, *, fused: bool = False, limit: MemoryLimit = None) -> Blocks:
        return blocks_of(
            placement,
            cost,
            activation_limit=limit,
            accounting=accounting,
            freed=freed,
            fused=fused,
        )

    _, whole, back, weight = cost.table(placement.stages)[:4]
    briefer = any(b < i + w for b, i, w in zip(whole, back, weight, strict=True))
    found = []
    for fused in (False, True)[: 1 + briefer]:
        blocks = blocks_at(cost, fused=fused, limit=activation_limit)
        if blocks.work == 0:
            raise ScheduleError("search: the operations take no time; give a cost above 0")
        free = blocks_at(cost, fused=fused)
        repetend, proved = _repetend(blocks, free, microbatches, seconds / 2)
        assert repetend is not None  # micro-batches can always run one by one
        order = completed(blocks, repetend, microbatches, seconds / 2)
        schedule = blocks.schedule("repetend", order)
        found.append(
            RepetendSearch(
                schedule=schedule,
                value=simulate(schedule, cost).makespan,
                lower_bound=_bound(blocks_at(cheapest(cost, placement.stages)), microbatches),
                period=blocks.time(repetend.period),
                in_flight=repetend.depth,
                proved=proved,
            )
        )
    return min(found, key=lambda result: result.value)


def _bound(blocks: Blocks, microbatches: int) -> Time:
    return blocks.time(blocks.least(microbatches))


def _repetend(blocks: Blocks, free: Blocks, microbatches: int, seconds: float) -> Decision:
    """Return the repetend of the shortest period with the fewest micro-batches in flight.

    `free` has the same blocks without memory limits. More micro-batches in flight than it needs to
    keep its busiest rank always busy are not tried.
    """
    best, proved, each, stop = one_by_one(blocks), True, seconds / CALLS, monotonic() + seconds
    for depth in range(1, microbatches + 1):
        found, decided = shorter(blocks, depth, best, each, stop)
        best, proved = found or best, decided
        if best.period == blocks.work or monotonic() > stop:
            break
        if of_period(free, depth, free.work, each).repetend is not None:
            break
    return Decision(best, proved)
