"""Search for a schedule: over placements, and against the registered schedules."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypedDict

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time, plain, ratio
from megapipe.schedule.data_parallel import REPLICAS, ReplicaPolicy
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, loop, vee, wave
from megapipe.schedule.search.instance import (
    Accounting,
    MemoryLimit,
    can_run,
    instance,
    least_limit,
    lower_bound,
)
from megapipe.schedule.search.portfolio import Portfolio
from megapipe.schedule.search.problem import Objective, Order, Problem
from megapipe.schedule.search.registered import Candidate, objective_of, registered
from megapipe.schedule.timing.times import in_ticks

PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "single": loop,
    "loop": lambda ranks: loop(ranks, 2),
    "v": vee,
    "wave": lambda ranks: wave(ranks, 2),
}
"""Placements by name; their ranks have 1, 2, 2 and 4 chunks."""
STARTS = 4
"""Registered schedules to start from, the best ones."""
FULL, SMALL, LEAST = 15_000_000, 3000, 40
"""The default effort: FULL operations timed on one placement for schedules of up to SMALL
operations, falling with the cube of the size above, but no less than LEAST whole orders."""


COMPARED = 16
"""Orders of each kind that are timed with gathers and reductions, where there are any; these
timings come on top of the effort."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. Times are those of the simulator."""

    schedule: Schedule
    """Its name is "searched", or that of a registered one that could not be beaten."""
    value: Time
    """The schedule's makespan, or its longest span."""
    lower_bound: Time
    """No schedule on any of the placements takes less; one that takes this need not exist."""
    baseline: str | None
    """The best registered schedule that fits; None where none does."""
    baseline_value: Time | None
    evaluations: int
    """Effort spent over all placements, in timings of a whole order."""

    @property
    def placement(self) -> Placement:
        """Where the stages of the schedule live."""
        return self.schedule.placement


class Progress(NamedTuple):
    """How far a search is."""

    placement: Placement
    """The placement that is searched now."""
    value: Time
    """The best value found on it so far."""


def search(
    ranks: int,
    microbatches: int,
    *,
    cost_of: Callable[[Placement], Cost],
    policy: ReplicaPolicy = REPLICAS,
    placements: Sequence[Placement | str] = tuple(PLACEMENTS),
    memory_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    objective: Objective = "makespan",
    evaluations: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> SearchResult:
    """Find a schedule for uneven stages, latency and a memory limit.

    The schedule keeps the limit, and is at least as good as every registered schedule on one of the
    placements that keeps the limit too. Equal arguments give equal results.

    Args:
        ranks: pipeline ranks.
        microbatches: micro-batches per step.
        cost_of: what operations cost on a placement; jitter is left out. Orders are improved
            without gathers and reductions, which count when the best ones are compared.
        policy: when replicas gather and reduce.
        placements: where to search: placements with one direction, or names of :data:`PLACEMENTS`.
        memory_limit: micro-batches of a full rank that may be alive at once, one number for all
            ranks or one for each; None: no limit.
        accounting: "held" counts an activation from F to W; "weighted" frees a share at I.
        freed: that share, from 0 to 1.
        objective: "makespan", or "span": the longest time from a rank's own first start to its
            own last end.
        evaluations: effort on each placement, in timings of a whole order; default: some seconds
            for small schedules, some tens of microseconds per operation for large ones.
        seed: of the random choices.
        progress: is called now and then.

    Raises:
        ScheduleError: no schedule keeps the limit, or an argument is out of range.
    """
    if evaluations is not None and evaluations < 1:
        raise ScheduleError(f"search: evaluations must be at least 1, not {evaluations}")
    where = list(dict.fromkeys(_placement(each, ranks) for each in placements))
    if not where:
        raise ScheduleError("search: no placement was given; at least one is needed")
    terms: _Terms = {
        "memory_limit": memory_limit,
        "accounting": accounting,
        "freed": freed,
        "objective": objective,
    }
    rng = random.Random(seed)
    sites = [
        _Site(placement, microbatches, cost_of(placement), policy, terms) for placement in where
    ]
    sites = [site for site in sites if can_run(site.problem)]
    if not sites:
        smallest = min(map(least_limit, where))
        raise ScheduleError(
            f"search: memory_limit {memory_limit} is too small on every placement; {smallest} "
            "micro-batches of a full rank is the least that lets one through"
        )
    rivals = [rival for site in sites for rival in site.rivals]
    baseline = min(rivals, key=_value, default=None)
    best = baseline
    for site in sorted(sites, key=lambda site: site.bound):
        if best is None or site.bound < best.value:
            found = site.hunt(evaluations, rng, progress)
            best = found if best is None else min(best, found, key=_value)
    assert best is not None  # there is a site, and the first one is hunted without a baseline
    return SearchResult(
        schedule=best.schedule,
        value=best.value,
        lower_bound=min(site.bound for site in sites),
        baseline=baseline.schedule.name if baseline else None,
        baseline_value=baseline.value if baseline else None,
        evaluations=sum(site.spent for site in sites),
    )


class _Terms(TypedDict):
    memory_limit: MemoryLimit
    accounting: Accounting
    freed: Time
    objective: Objective


class _Site:
    """The search on one placement. Inside, costs are whole numbers, `scale` times as large."""

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        cost: Cost,
        policy: ReplicaPolicy,
        terms: _Terms,
    ) -> None:
        self.placement, self.microbatches, self.terms = placement, microbatches, terms
        self.policy = policy
        self.cost, self.scale = in_ticks(placement, replace(cost, jitter=0.0))
        self.problem = instance(placement, microbatches, self.cost, **terms)
        self.spent = 0

    def time(self, value: Time) -> Time:
        """A time in the units of the given costs."""
        return plain(ratio(value, self.scale))

    @cached_property
    def bound(self) -> Time:
        """No schedule here takes less."""
        return self.time(lower_bound(self.placement, self.microbatches, self.cost, **self.terms))

    @cached_property
    def rivals(self) -> list[Candidate]:
        """The registered schedules here, the best first."""
        found = registered(self.problem, self.policy)
        return [rival._replace(value=self.time(rival.value)) for rival in found]

    def hunt(
        self, evaluations: int | None, rng: random.Random, progress: Callable[[Progress], None]
    ) -> Candidate:
        """The best schedule found, with split and, where that may pay, with fused backwards."""
        problems = [self.problem]
        _, fused, back, weight = self.cost.table(self.placement.stages)[:4]
        if any(b < i + w for b, i, w in zip(fused, back, weight, strict=True)):
            problems.append(
                instance(self.placement, self.microbatches, self.cost, fused=True, **self.terms)
            )
        found = []
        replicas = self.cost.has_replicas(self.placement.stages)
        for problem in problems:
            timings = evaluations or _default_evaluations(problem.size)
            effort = timings * problem.size // len(problems)
            portfolio = Portfolio(
                problem,
                effort,
                rng,
                self._starts,
                lambda value: progress(Progress(self.placement, self.time(value))),
            )
            portfolio.run()
            for timed in portfolio.pool[: COMPARED if replicas else 1]:
                schedule = problem.schedule(timed.order)
                value = objective_of(schedule, self.cost, problem.objective, self.policy)
                found.append(Candidate(schedule, self.time(value)))
            self.spent += -(-(effort - portfolio.left) // problem.size)
        return min(found, key=_value)

    def _starts(self, problem: Problem) -> list[Order]:
        """The best registered schedules, as far as they are orders of the problem."""
        rivals = self.rivals
        if problem.microbatches < self.microbatches:
            rivals = registered(problem, self.policy) if problem.size <= SMALL else []
        orders = (problem.order(rival.schedule) for rival in rivals[:STARTS])
        return [order for order in orders if order is not None and problem.fits(order)]


def _value(candidate: Candidate) -> Time:
    return candidate.value


def _default_evaluations(size: int) -> int:
    shrink = min(1.0, SMALL / size) ** 3
    return max(LEAST, int(FULL * shrink) // size)


def _placement(given: Placement | str, ranks: int) -> Placement:
    if isinstance(given, Placement):
        if given.ranks != ranks:
            raise ScheduleError(
                f"search: a placement has {given.ranks} ranks; the search is for {ranks}"
            )
        return given
    if given not in PLACEMENTS:
        raise ScheduleError(
            f"search: placement {given!r} is unknown; the known ones are {', '.join(PLACEMENTS)}"
        )
    return PLACEMENTS[given](ranks)
