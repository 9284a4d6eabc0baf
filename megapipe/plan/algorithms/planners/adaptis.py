"""AdaPtis: tune the partition, the placement and the schedule in turn (2509.23722).

A placement says which stages a device has (one, several in a loop, a V, a wave). A schedule is a
registered one, or an order made by a greedy rule for the costs at hand. Each of the three is tuned
while the others stay as they are, again and again until nothing helps. The search starts from the
best plan of each kind of tuning alone, so its result is at least as good as all three.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice, pairwise
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.plan.algorithms.judge import Judged, judge
from megapipe.plan.algorithms.local_search import Trials, descend, in_turn
from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.shapes import likely_shapes
from megapipe.plan.algorithms.stages import Uniform, positions
from megapipe.schedule.generators import accepts, build
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement
from megapipe.schedule.search import PLACEMENTS
from megapipe.schedule.search.greedy import greedy, rules
from megapipe.schedule.search.problem import Problem as OrderProblem

SCHEDULES = {
    "single": ("1f1b", "gpipe", "eager_1f1b", "zb_h1", "zb_h2", "zb_1p", "zb_2p"),
    "loop": ("interleaved_1f1b", "breadth_first"),
    "v": ("1f1b_v", "v_min", "v_half", "v_zb", "zb_v"),
    "wave": ("hanayo",),
}
"""Registered schedules on each placement. Those that do not exist for some sizes are left out."""
RULES = 15
"""Number of greedy rules that are tried."""
PLANS = 120
"""Number of plans that are evaluated for each number of ranks."""
SHAPES = 2
"""Number of pipelines with different numbers of ranks, or degrees of tensor parallelism, that are
tuned."""


class Tuned(NamedTuple):
    """A partition, a placement and a schedule."""

    cuts: tuple[int, ...]
    placement: str
    """Name in :data:`~megapipe.schedule.search.PLACEMENTS`."""
    order: str
    """Name of a registered schedule, or number of a greedy rule."""


class AdaPtis:
    """The search for pipelines in which each rank has equally many devices."""

    def __init__(self, problem: Problem, shape: Uniform, limit: int = PLANS) -> None:
        self._problem, self._shape = problem, shape
        self._judged, self._registered = cache(self._judge), cache(self._build)
        self.trials: Trials[Tuned] = Trials(self._cost, limit)
        self.start = Tuned(self._even("single"), "single", "1f1b")
        """Equal numbers of units for each rank, and 1F1B."""
        self._coordinates = (self._orders, self._placements, self._partitions)

    def run(self) -> Trials[Tuned]:
        """Tune each thing alone, then all in turn from each of these plans. Partitions come last,
        since a long pipeline has most of them."""
        alone = [self.alone(number) for number in range(len(self._coordinates))]
        for start in sorted(alone, key=self.trials):
            in_turn(self.trials, start, self._coordinates)
        return self.trials

    def alone(self, number: int) -> Tuned:
        """Return the best plan if only one thing is tuned: schedule (0), placement (1) or partition
        (2)."""
        return min([self.start, *self._coordinates[number](self.start)], key=self.trials)

    def plan(self, tuned: Tuned) -> PlannedPipeline:
        """Return the plan."""
        registered = self._registered(tuned.placement)
        schedule = registered.get(tuned.order)
        if schedule is None:
            known = next(iter(registered))
            cost = self._judged(tuned._replace(order=known)).timeline.cost
            placement = self._placement(tuned.placement)
            orders = OrderProblem(placement, self._problem.microbatches, cost)
            rule = next(islice(rules(orders), int(tuned.order), None))
            schedule = orders.schedule(greedy(orders, rule))
        ends, width = (0, *tuned.cuts, self._problem.length), self._shape.devices
        stages = []
        for rank, (first, last) in zip(schedule.placement.table[0], pairwise(ends), strict=True):
            devices = range(rank * width, (rank + 1) * width)
            stages.append(stage(first, last, devices, self._shape.tp))
        named = tuned.order in registered and tuned.placement in ("single", "loop")
        order = tuned.order if named else schedule
        return PlannedPipeline(tuple(stages), self._problem.microbatches, order)

    def _judge(self, tuned: Tuned) -> Judged:
        return judge(self._problem, self.plan(tuned))

    def _cost(self, tuned: Tuned) -> float | None:
        found = self._judged(tuned)
        return found.seconds if found.fits else None

    def _partitions(self, tuned: Tuned) -> Iterator[Tuned]:
        """Yield the partition to which moves of single cuts lead, those beside busy ranks first."""
        ends = positions(self._problem)

        def moves(each: Tuned) -> Iterator[Tuned]:
            busy, row = self._judged(each).timeline.busy, self._placement(each.placement).table[0]
            beside = [max(map(busy.__getitem__, pair)) for pair in pairwise(row)]
            for index in sorted(range(len(beside)), key=beside.__getitem__, reverse=True):
                cut = each.cuts[index]
                low, high = (0, *each.cuts, ends[-1])[index : index + 3 : 2]
                place = ends.index(cut)
                for other in (ends[place - 1], ends[place + 1]):
                    if low < other < high:
                        moved = (*each.cuts[:index], other, *each.cuts[index + 1 :])
                        yield each._replace(cuts=moved)

        yield descend(self.trials, tuned, moves)

    def _placements(self, tuned: Tuned) -> Iterator[Tuned]:
        """Yield the other placements, with equal stages and each schedule made for them."""
        parts = len(positions(self._problem)) - 1
        for name in SCHEDULES:
            if name != tuned.placement and self._placement(name).stages <= parts:
                yield from (Tuned(self._even(name), name, each) for each in self._registered(name))

    def _orders(self, tuned: Tuned) -> Iterator[Tuned]:
        """Yield every schedule on the same placement."""
        for order in (*self._registered(tuned.placement), *map(str, range(RULES))):
            yield tuned._replace(order=order)

    def _placement(self, name: str) -> Placement:
        return PLACEMENTS[name](self._shape.stages)

    def _even(self, placement: str) -> tuple[int, ...]:
        """Return cuts into stages with nearly equal numbers of units."""
        count, ends = self._placement(placement).stages, positions(self._problem)
        return tuple(ends[index * (len(ends) - 1) // count] for index in range(1, count))

    def _build(self, placement: str) -> dict[str, Schedule]:
        """Return the registered schedules on a placement by name."""
        own, found = self._placement(placement), {}
        for name in SCHEDULES[placement]:
            chunks = own.stages // own.ranks if "chunks" in accepts(name) else None
            sizes = {"ranks": own.ranks, "microbatches": self._problem.microbatches}
            with suppress(ScheduleError):  # it needs other numbers of ranks or micro-batches
                schedule = build(name, **sizes, chunks=chunks)
                if schedule.placement == own:
                    found[name] = schedule
        return found


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the best plan over the sizes of ranks with the fastest equal stages."""
    searches = [AdaPtis(problem, shape) for shape in likely_shapes(problem, SHAPES)]
    best = min(searches, key=lambda search: search.run().least, default=None)
    return best.plan(best.trials.best) if best and best.trials.best else None


ALGORITHMS = (Algorithm("adaptis", "AdaPtis (2509.23722)", "simulated step time", plan),)
