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
"""Functions from a number of ranks to a placement, by the placement's name."""
STARTS = 4
"""Maximum number of registered schedules from which a search starts; it takes the best ones."""
FULL, SMALL, LEAST = 15_000_000, 3000, 40
"""Default effort on one placement: for schedules of up to SMALL operations, FULL operations are
timed. For larger schedules the effort falls with the cube of the size, but at least LEAST whole
orders are timed."""


COMPARED = 16
"""Maximum number of best orders of a portfolio that are simulated with gathers and reductions; only
one if these take no time. The effort does not include these simulations."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. Times are in the unit of the cost, as the simulator's are."""

    schedule: Schedule
    """The schedule found, named "searched", or a registered one that could not be beaten."""
    value: Time
    """Makespan or longest span of the schedule, whichever is the objective."""
    lower_bound: Time
    """Lower bound of `value` for all schedules on the placements; it can be unreachable."""
    baseline: str | None
    """Name of the best registered schedule within the memory limit; None if none is within it."""
    baseline_value: Time | None
    evaluations: int
    """Effort spent on all placements, as the number of times that a whole order was timed."""

    @property
    def placement(self) -> Placement:
        """Placement of the schedule's stages."""
        return self.schedule.placement


class Progress(NamedTuple):
    """Progress of a search."""

    placement: Placement
    """The placement that is being searched."""
    value: Time
    """Best value found on this placement so far."""


def search(
    ranks: int,
    microbatches: int,
    *,
    cost_of: Callable[[Placement], Cost],
    policy: ReplicaPolicy = REPLICAS,
    placements: Sequence[Placement | str] = tuple(PLACEMENTS),
    activation_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    objective: Objective = "makespan",
    evaluations: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> SearchResult:
    """Find a schedule for uneven stages, latency and a memory limit.

    The schedule keeps the limit. It is at least as good as every registered schedule that keeps the
    limit and has one of the `placements`. Equal arguments give equal results.

    Args:
        ranks: pipeline ranks.
        microbatches: micro-batches per step.
        cost_of: function that returns the costs on a placement; jitter is ignored. Gathers and
            reductions count only when the best orders are compared at the end.
        policy: when data-parallel replicas gather weights and reduce gradients.
        placements: placements to search, with one direction, or names of :data:`PLACEMENTS`.
        activation_limit: memory limit, one number for all ranks or one per rank. The unit is the
            activations of one micro-batch on a rank with 1 / ranks of the model. None: no limit.
        accounting: "held" counts an activation fully from F to W; "weighted" counts only the share
            1 - `freed` of it after I.
        freed: share of an activation that I frees, from 0 to 1.
        objective: what is minimized: "makespan", or "span", the maximum over ranks of the time from
            a rank's first start to its last end.
        evaluations: effort on each placement, as the number of times that a whole order can be
            timed. Default: some seconds for small schedules, some tens of microseconds per
            operation for large ones.
        seed: seed of the random choices.
        progress: function that is called with the progress from time to time.

    Raises:
        ScheduleError: no schedule keeps the limit, or an argument is out of range.
    """
    if evaluations is not None and evaluations < 1:
        raise ScheduleError(f"search: evaluations must be at least 1, not {evaluations}")
    candidates = list(dict.fromkeys(_placement(each, ranks) for each in placements))
    if not candidates:
        raise ScheduleError("search: no placement was given; at least one is needed")
    terms: _Terms = {
        "activation_limit": activation_limit,
        "accounting": accounting,
        "freed": freed,
        "objective": objective,
    }
    rng = random.Random(seed)
    sites = [
        _Site(placement, microbatches, cost_of(placement), policy, terms)
        for placement in candidates
    ]
    sites = [site for site in sites if can_run(site.problem)]
    if not sites:
        smallest = min(map(least_limit, candidates))
        raise ScheduleError(
            f"search: activation_limit {activation_limit} is too small on every placement; it must "
            f"be at least {smallest}, so that one micro-batch can pass all stages"
        )
    rivals = [rival for site in sites for rival in site.rivals]
    baseline = min(rivals, key=_value, default=None)
    best = baseline
    for site in sorted(sites, key=lambda site: site.bound):
        if best is None or site.bound < best.value:
            found = site.hunt(evaluations, rng, progress)
            best = found if best is None else min(best, found, key=_value)
    assert best is not None  # there is a site, and without a baseline the first site is searched
    return SearchResult(
        schedule=best.schedule,
        value=best.value,
        lower_bound=min(site.bound for site in sites),
        baseline=baseline.schedule.name if baseline else None,
        baseline_value=baseline.value if baseline else None,
        evaluations=sum(site.spent for site in sites),
    )


class _Terms(TypedDict):
    activation_limit: MemoryLimit
    accounting: Accounting
    freed: Time
    objective: Objective


class _Site:
    """Search on one placement. Its costs are converted to whole numbers, `scale` times as large."""

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
        """Convert a time of the search to the unit of the caller's costs."""
        return plain(ratio(value, self.scale))

    @cached_property
    def bound(self) -> Time:
        """Lower bound of the objective for all schedules on this placement."""
        return self.time(lower_bound(self.placement, self.microbatches, self.cost, **self.terms))

    @cached_property
    def rivals(self) -> list[Candidate]:
        """The registered schedules on this placement, best first."""
        found = registered(self.problem, self.policy)
        return [rival._replace(value=self.time(rival.value)) for rival in found]

    def hunt(
        self, evaluations: int | None, rng: random.Random, progress: Callable[[Progress], None]
    ) -> Candidate:
        """Search and return the best schedule found: with split backwards and, if B is shorter than
        I + W on any stage, also with fused backwards."""
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
        """Return the best registered schedules as orders, if they can be written as such."""
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
            f"search: placement {given!r} is unknown; known placements are {', '.join(PLACEMENTS)}"
        )
    return PLACEMENTS[given](ranks)
