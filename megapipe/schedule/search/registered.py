"""Registered schedules that a search has to beat."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.generators import accepts, build, names
from megapipe.schedule.ir import JOINED, Schedule
from megapipe.schedule.memory import peak_weighted
from megapipe.schedule.search.problem import Objective, Problem
from megapipe.schedule.timing.simulate import simulate


class Candidate(NamedTuple):
    """A schedule, and its simulated objective (makespan or longest span)."""

    schedule: Schedule
    value: Time


def objective_of(
    schedule: Schedule, cost: Cost, objective: Objective, policy: ReplicaPolicy
) -> Time:
    """Simulate a schedule and return its makespan or longest span, whichever is the objective."""
    timeline = simulate(schedule, cost, policy)
    return timeline.makespan if objective == "makespan" else max(timeline.spans)


def registered(problem: Problem, policy: ReplicaPolicy) -> list[Candidate]:
    """Return the registered schedules on the problem's placement that keep its limits, best first.

    Schedules that split micro-batches or sequences, recompute or join operations are omitted: a
    search orders whole operations with fixed costs.
    """
    found = [
        Candidate(schedule, objective_of(schedule, problem.cost, problem.objective, policy))
        for schedule in _built(problem)
        if _fits(problem, schedule)
    ]
    return sorted(found, key=lambda candidate: candidate.value)


def _fits(problem: Problem, schedule: Schedule) -> bool:
    if problem.limits is None:
        return True
    order = problem.order(schedule)
    if order is not None:
        return problem.fits(order)
    peaks = peak_weighted(schedule, problem.freed)
    return all(peak <= limit for peak, limit in zip(peaks, problem.limits, strict=True))


def _built(problem: Problem) -> Iterator[Schedule]:
    """Yield every registered schedule that a search can be compared with, each with several
    values of microbatch_group_size if its generator has this option.

    A schedule is first built with two micro-batches, to test at low cost whether it is usable.
    """
    ranks, m = problem.placement.ranks, problem.microbatches
    hints: dict[str, Any] = {"cost": problem.cost, "chunks": max(1, problem.stages // ranks)}
    if problem.limits is not None:
        hints["activation_limit"] = min(problem.limits)
    groups = [None, *sorted({-(-ranks // 2), 2 * ranks, m} - {ranks})]
    for name in names():
        taken = accepts(name)
        options = {what: value for what, value in hints.items() if what in taken}
        for group in groups if "microbatch_group_size" in taken else [None]:
            for size in sorted({min(m, 2), m}):
                try:
                    schedule = build(
                        name,
                        ranks=ranks,
                        microbatches=size,
                        microbatch_group_size=group,
                        **options,
                    )
                except ScheduleError:
                    break
                if not _plain(schedule) or schedule.placement != problem.placement:
                    break
                if size == m:
                    yield schedule


def _plain(schedule: Schedule) -> bool:
    cut = schedule.slices > 1 or schedule.sizes or schedule.recompute or schedule.forward_only
    return not cut and max(map(max, schedule.ops)) < JOINED
