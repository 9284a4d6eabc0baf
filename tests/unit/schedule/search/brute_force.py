"""All orders of a small problem, tried one by one: a referee for the constraint solver.

The model is written anew here: a rank runs one operation at a time, and an operation of a stage
that spans all ranks needs all of them. It knows nothing of messages and memory limits.
"""

from typing import NamedTuple

from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Kind
from megapipe.schedule.placement import Placement


class _Step(NamedTuple):
    """An operation of every micro-batch: where it runs, how long, and after which step."""

    ranks: tuple[int, ...]
    time: int
    after: int | None


def shortest_makespan(placement: Placement, microbatches: int, cost: Cost, *, fused: bool) -> int:
    """Return the least makespan of all orders in which each step runs in micro-batch order."""
    steps = _steps(placement, cost, fused=fused)
    nothing = (0,) * len(steps), (0,) * placement.ranks, ((),) * len(steps)
    states = {nothing}
    for _ in range(len(steps) * microbatches):
        states = {
            follower for state in states for follower in _followers(steps, microbatches, state)
        }
    return min(max(free) for _, free, _ in states)


def _steps(placement: Placement, cost: Cost, *, fused: bool) -> list[_Step]:
    stages = range(placement.stages)
    times = cost.table(placement.stages)
    ranks = [placement.holders(stage) for stage in stages]
    steps = [_Step(ranks[s], times[Kind.F][s], s - 1 if s else None) for s in stages]
    for stage in reversed(stages):
        steps.append(_Step(ranks[stage], times[Kind.B if fused else Kind.I][stage], len(steps) - 1))
    if not fused:
        for stage in stages:
            after = 2 * placement.stages - 1 - stage
            steps += [_Step((rank,), times[Kind.W][stage], after) for rank in ranks[stage]]
    return steps


def _followers(steps, microbatches, state):
    """Yield each state in which one more operation has run. A state has the number of operations
    done per step, the time from which each rank is free, and per step the ends that later steps
    still need."""
    done, free, ends = state
    for index, step in enumerate(steps):
        number = done[index]
        if number == microbatches:
            continue
        ready = 0
        if step.after is not None:
            if done[step.after] <= number:
                continue
            ready = ends[step.after][number - done[step.after]]
        end = max(ready, *(free[rank] for rank in step.ranks)) + step.time
        now = [end if rank in step.ranks else time for rank, time in enumerate(free)]
        kept = list(ends)
        kept[index] = (*ends[index], end)
        counts = (*done[:index], number + 1, *done[index + 1 :])
        for before in {step.after, index} - {None}:
            waiting = [counts[i] for i, other in enumerate(steps) if other.after == before]
            oldest = counts[before] - min(waiting, default=counts[before])
            kept[before] = kept[before][len(kept[before]) - oldest :]
        yield counts, tuple(now), tuple(kept)
