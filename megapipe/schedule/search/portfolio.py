"""Search for one problem: the methods that are tried, and the effort that each method gets.

1. Orders are made by rules, by beam search and from random patterns. If there are more
   micro-batches than fill the pipeline, orders from a search with fewer micro-batches are
   stretched.
2. Tabu search starts from the best of these orders.
3. Each of the few best orders is shaken repeatedly; a short tabu search follows, and the better
   order is kept.

Effort is counted in operations timed, so the result depends on the arguments alone.
"""

import random
from collections.abc import Callable
from itertools import islice

from megapipe.schedule.cost import Time
from megapipe.schedule.search.beam import beam
from megapipe.schedule.search.bound import least
from megapipe.schedule.search.greedy import greedy, rules
from megapipe.schedule.search.local import Tabu, shaken
from megapipe.schedule.search.pattern import Patterns
from megapipe.schedule.search.problem import Order, Problem, TimedOrder
from megapipe.schedule.search.stretch import stretched

RULE, STATE, ITERATION, SHAKE = 13, 60, 5, 25
"""Efforts of a greedy pass, one state of the beam, one iteration of tabu search, and shaking an
order. The unit is the effort of timing a whole order once."""
STRETCHED = 12
"""Maximum number of orders from the search with fewer micro-batches that are stretched."""
ELITE = 4
POLISHED = 6
WIDTH, SAMPLES, CLIMBS, CHANGES = 300, 200, 3, 300
"""Maximum numbers of beam states, random patterns, patterns to improve, and changes per pattern."""
POLISH, RESTART = 300, 60
"""Iterations of tabu search: at most POLISH from an order that another method has made, RESTART
from a shaken order."""
SLACK = 0.01
"""Maximum share by which an order may be longer than the best one and still replace the current
order of the restarts."""


class Portfolio:
    """A search with a limited effort.

    Args:
        effort: maximum number of operations to time.
        starts: function that returns orders of a problem to start from.
        progress: function that is called from time to time with the best value so far.
    """

    def __init__(
        self,
        problem: Problem,
        effort: int,
        rng: random.Random,
        starts: Callable[[Problem], list[Order]] = lambda problem: [],
        progress: Callable[[Time], None] = lambda value: None,
    ) -> None:
        self.problem, self.effort, self.left, self.rng = problem, effort, effort, rng
        self.starts, self.progress = starts, progress
        self.target = least(problem)
        self.pool: list[TimedOrder] = []

    def run(self) -> TimedOrder:
        """Return the best order found."""
        for order in self.starts(self.problem):
            self._add(self.problem.timed(order))
        for make in (self._rules, self._shorter, self._beam, self._patterns):
            if not self._done():
                make()
                self.progress(self.pool[0].value)
        self._polish()
        self._restarts()
        return self.pool[0]

    def _done(self) -> bool:
        return bool(self.pool) and self.pool[0].value <= self.target

    def _add(self, timed: TimedOrder | None) -> None:
        """Add an order to the pool, unless the pool has one with an equal value: orders with equal
        values tend to be similar."""
        if timed is not None and all(timed.value != other.value for other in self.pool):
            self.pool.append(timed)
            self.pool.sort(key=lambda each: each.value)

    def _spend(self, timings: int) -> None:
        self.left -= timings * self.problem.size

    def _affords(self, share: float, price: int) -> int:
        """Return how many attempts a share of the effort allows, if one attempt takes the effort of
        timing `price` whole orders."""
        return int(min(share * self.effort, self.left) / (price * self.problem.size))

    def _rules(self) -> None:
        count = max(1, self._affords(0.1, RULE))
        for rule in islice(rules(self.problem), count):
            self._spend(RULE)
            self._add(self.problem.timed(greedy(self.problem, rule)))

    def _shorter(self) -> None:
        filling = self.problem.placement.ranks + 2
        if filling >= self.problem.microbatches:
            return
        short = self.problem.of_size(filling)
        share = 0.7 if self.problem.microbatches > 4 * filling else 0.3
        effort = int(min(self.left, share * self.effort))
        search = Portfolio(short, effort, self.rng, self.starts)
        search.run()
        self.left -= search.effort - search.left
        several = search.pool[:STRETCHED]
        count = max(1, self._affords(0.15, len(several)))
        for timed in several:
            for longer in stretched(short, timed.order, self.problem, count):
                self._spend(1)
                self._add(longer)

    def _beam(self) -> None:
        width = min(WIDTH, self._affords(0.2, STATE))
        if width > 0:
            self._spend(width * STATE)
            order = beam(self.problem, width)
            self._add(None if order is None else self.problem.timed(order))

    def _patterns(self) -> None:
        samples = min(SAMPLES, self._affords(0.05, 2))
        self._spend(2 * samples)
        patterns = Patterns(self.problem, self.rng)
        found = [sampled for _ in range(samples) if (sampled := patterns.sample()) is not None]
        found.sort(key=lambda sampled: sampled[1].value)
        changes = min(CHANGES, self._affords(0.1, 2 * CLIMBS))
        for pattern, timed in found[:CLIMBS]:
            self._spend(2 * changes)
            self._add(patterns.climb(pattern, timed, changes))

    def _polish(self) -> None:
        iterations = min(POLISH, self._affords(0.3, POLISHED * ITERATION))
        for timed in self.pool[:POLISHED]:
            if iterations and not self._done():
                better = self._tabu(timed.order, iterations)
                if better is not None and better.value < timed.value:
                    self.pool.remove(timed)
                    self._add(better)
                self.progress(self.pool[0].value)

    def _tabu(self, order: Order, iterations: int) -> TimedOrder | None:
        self._spend(ITERATION * iterations)
        return Tabu(self.problem, order, self.rng).run(iterations, self.target)

    def _restarts(self) -> None:
        price = (SHAKE + ITERATION * RESTART) * self.problem.size
        elite = self.pool[:ELITE]
        share = self.left // len(elite)
        for number, timed in enumerate(elite, start=1):
            best = current = timed
            while not self._done() and self.left - price >= (len(elite) - number) * share:
                self._spend(SHAKE)
                shaken_order = shaken(self.problem, current.order, self.rng)
                new = self._tabu(shaken_order, RESTART)
                if new is None:
                    continue
                longest = float(best.value) * (1 + SLACK * self.rng.random())
                if new.value <= current.value or new.value <= longest:
                    current = new
                if new.value < best.value:
                    best = new
                    self._add(best)
                    self.progress(self.pool[0].value)
