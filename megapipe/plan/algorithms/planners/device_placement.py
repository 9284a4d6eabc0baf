"""Device placement: any unit on any device (Mirhoseini et al., 1706.04972; Spotlight, ICML'18).

Both papers train a policy network by the measured time of a step. Here the simulator measures, and
search takes the policy's place; no policy is learned. Mirhoseini's recurrent policy places all
units at once: random placements stand for it, improved by moves of single units. Spotlight's Markov
decision process places one unit after the other: each unit in turn is put on its best device.

Neighbouring units on the same device form a stage, so a device can have several stages. The order
of operations is made by greedy rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, islice
from operator import itemgetter
from random import Random

from megapipe.plan.algorithms.judge import Judged, judge
from megapipe.plan.algorithms.local_search import Trials, descend, from_starts, in_turn
from megapipe.plan.algorithms.pipeline import PlannedPipeline, stage
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.shapes import likely_shapes
from megapipe.plan.algorithms.stages import Uniform, positions
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.placement import Placement
from megapipe.schedule.search.greedy import greedy, rules
from megapipe.schedule.search.problem import Problem as OrderProblem

Ranks = tuple[int, ...]
"""Pipeline rank of each part of the chain between two possible cuts."""
PLACEMENTS = 100
"""Number of placements that are evaluated for each number of ranks."""
SHAPES = 2
"""Number of sizes of ranks for which placements are searched."""
MOST_RANKS = 16
"""Maximum number of ranks."""
FEW = 2
"""Number of micro-batches per rank with which placements are compared."""
RULES = (0, 6)
"""Numbers of the greedy rules: forwards and weight gradients without a limit; as few forwards in
flight as in 1F1B, and no deferred weight gradients."""


class DevicePlacement:
    """The search for placements on ranks of equally many devices."""

    def __init__(self, problem: Problem, shape: Uniform, seed: int = 0) -> None:
        self._problem, self._shape, self._random = problem, shape, Random(seed)
        self._ends = positions(problem)
        self.judged = cache(self._judge)
        """Function that returns the plan of a placement, judged."""
        self._parts = range(len(self._ends) - 1)

    def random_then_local(self, limit: int = PLACEMENTS) -> Trials[Ranks]:
        """Improve random placements by moves of single parts (in place of Mirhoseini's policy)."""
        trials = Trials(self._cost, limit)
        from_starts(trials, self._starts(), lambda start: descend(trials, start, self._moves))
        return trials

    def one_by_one(self, limit: int = PLACEMENTS) -> Trials[Ranks]:
        """Put one part after the other on its best rank (in place of Spotlight's policy)."""
        trials = Trials(self._cost, limit)
        coordinates = [partial(self._elsewhere, part) for part in self._parts]
        from_starts(trials, self._starts(), lambda start: in_turn(trials, start, coordinates))
        return trials

    def plan(self, ranks: Ranks) -> PlannedPipeline:
        """Return the plan of a placement, in the shortest order of the greedy rules that fits; in
        the longest one if none does."""
        return self.judged(ranks)[0]

    def _judge(self, ranks: Ranks) -> tuple[PlannedPipeline, Judged]:
        first_use = {rank: number for number, rank in enumerate(dict.fromkeys(ranks))}
        width, stages, row = self._shape.devices, [], []
        for rank, parts in groupby(self._parts, key=ranks.__getitem__):
            own = list(parts)
            devices = range(rank * width, (rank + 1) * width)
            ends = self._ends[own[0]], self._ends[own[-1] + 1]
            stages.append(stage(*ends, devices, self._shape.tp))
            row.append(first_use[rank])
        placement, count = Placement(len(first_use), (tuple(row),)), self._problem.microbatches
        made = partial(PlannedPipeline, tuple(stages), count)
        plan = made(gpipe_on(placement, count))
        judged = judge(self._problem, plan)
        orders = OrderProblem(placement, count, judged.timeline.cost)
        known = list(islice(rules(orders), max(RULES) + 1))
        timed = [orders.timed(greedy(orders, known[number])) for number in RULES]
        for each in sorted((each for each in timed if each is not None), key=itemgetter(0)):
            plan = made(orders.schedule(each.order))
            judged = judge(self._problem, plan)
            if judged.fits:
                break
        return plan, judged

    def _cost(self, ranks: Ranks) -> float | None:
        _, found = self.judged(ranks)
        return found.seconds if found.fits else None

    def _starts(self) -> Iterator[Ranks]:
        """Yield random placements; in every other one, the first too, each rank has neighbouring
        parts alone."""
        count = self._shape.stages
        while True:
            ranks = [self._random.randrange(count) for _ in self._parts]
            yield tuple(sorted(ranks))
            yield tuple(ranks)

    def _moves(self, ranks: Ranks) -> Iterator[Ranks]:
        """Yield the placements in which one part is elsewhere, in random order."""
        for part in self._random.sample(self._parts, len(self._parts)):
            yield from self._elsewhere(part, ranks)

    def _elsewhere(self, part: int, ranks: Ranks) -> Iterable[Ranks]:
        """Yield the placements in which a part is on another rank."""
        for rank in range(self._shape.stages):
            if rank != ranks[part]:
                yield (*ranks[:part], rank, *ranks[part + 1 :])


def mirhoseini(problem: Problem) -> PlannedPipeline | None:
    """Return the best placement of random and local search."""
    return _best(problem, one_by_one=False)


def spotlight(problem: Problem) -> PlannedPipeline | None:
    """Return the best placement of a search by units."""
    return _best(problem, one_by_one=True)


def _best(problem: Problem, *, one_by_one: bool) -> PlannedPipeline | None:
    """Search for likely sizes of ranks with few micro-batches, and return the best of the results
    with all of them."""
    best: tuple[float, PlannedPipeline] | None = None
    for shape in likely_shapes(problem, SHAPES, MOST_RANKS):
        few = replace(problem, microbatches=min(problem.microbatches, FEW * shape.stages))
        search = DevicePlacement(few, shape)
        ranks = (search.one_by_one() if one_by_one else search.random_then_local()).best
        if ranks is not None:
            plan, judged = DevicePlacement(problem, shape).judged(ranks)
            if judged.fits and (best is None or judged.seconds < best[0]):
                best = judged.seconds, plan
    return best and best[1]


ALGORITHMS = (
    Algorithm(
        "device_placement",
        "Device placement (Mirhoseini et al., 1706.04972); random and local search, no policy",
        "simulated step time",
        mirhoseini,
    ),
    Algorithm(
        "spotlight",
        "Spotlight (Gao et al., ICML'18); search by units, no policy",
        "simulated step time",
        spotlight,
    ),
)
