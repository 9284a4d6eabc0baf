"""Orders that repeat one pattern for every micro-batch, as building blocks do (2405.15362).

A *pattern* gives each stream (one kind of operation at one stage) a start time for micro-batch 0,
its *offset*; micro-batch n follows n periods later. A rank runs its operations in the order of
these times. Only the order counts: the times need not be feasible. However little memory a rank
has, a pattern keeps the limit if its period is long enough.
"""

import random
from typing import NamedTuple

from megapipe.schedule.search.problem import Order, Problem, TimedOrder

LATE_ACCEPTANCE = 20
"""History length of late acceptance: a changed pattern is accepted if its order is at most as long
as the current order, or as the order that was current this number of changes ago."""


class Pattern(NamedTuple):
    """Start time of micro-batch 0 in each stream, and the time between two micro-batches."""

    offsets: list[float]
    period: float


class Patterns:
    """Random patterns for one problem, and their improvement."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng
        m, stages = problem.microbatches, problem.stages
        first = range(0, problem.size, m)
        self.duration = [float(problem.duration[op]) for op in first]
        self.lag = [float(problem.lag[op]) for op in first]
        self.chain = [*range(stages), *(stages + stage for stage in reversed(range(stages)))]
        """The streams that a micro-batch passes, in order."""
        self.streams: list[list[int]] = [[] for _ in problem.chunks]
        for stream, op in enumerate(first):
            self.streams[problem.rank[op]].append(stream)
        self.work = max(sum(self.duration[stream] for stream in row) for row in self.streams)

    def order(self, pattern: Pattern) -> Order:
        """Return the order of operations that a pattern defines."""
        m, (offsets, period) = self.problem.microbatches, pattern
        return [
            [
                op
                for _, op in sorted(
                    (offsets[stream] + number * period, stream * m + number)
                    for stream in row
                    for number in range(m)
                )
            ]
            for row in self.streams
        ]

    def sample(self) -> tuple[Pattern, TimedOrder] | None:
        """Return a random pattern and its order; None if the order deadlocks. The period is the
        first one tried that keeps the memory limit."""
        offsets = self._offsets()
        period = self.work * self.rng.uniform(1, 1.1)
        while not self.problem.fits(order := self.order(Pattern(offsets, period))):
            period *= 1.1
        timed = self.problem.timed(order)
        return None if timed is None else (Pattern(offsets, period), timed)

    def _offsets(self) -> list[float]:
        """Return the start times of a micro-batch that is alone in the pipeline, with a random wait
        before each operation."""
        rng, stages = self.rng, self.problem.stages
        waits = [rng.choice((0, 0, 0, rng.uniform(0, 2))) for _ in range(2)]
        jitter, delay = rng.choice((0, 0, 0.1, 0.3)), rng.choice((0, 0, 0.5, 1, 2))
        offsets = [0.0] * len(self.duration)
        now = 0.0
        for stream in self.chain:
            wait = waits[stream >= stages] + jitter * rng.random()
            now += self.lag[stream] + wait * self.duration[stream]
            offsets[stream] = now
            now += self.duration[stream]
        for stream in range(2 * stages, len(offsets)):
            back = stream - stages
            wait = delay * rng.random() * self.work
            offsets[stream] = offsets[back] + self.duration[back] + wait
        return offsets

    def climb(self, pattern: Pattern, timed: TimedOrder, changes: int) -> TimedOrder:
        """Improve a pattern by late-acceptance hill climbing (Burke and Bykov 2017), with random
        changes of offsets. Return the best order found."""
        best, current = timed, timed.value
        history = [current] * LATE_ACCEPTANCE
        for number in range(changes):
            changed = self._changed(pattern)
            if changed is None or not self.problem.fits(order := self.order(changed)):
                continue
            new = self.problem.timed(order)
            if new is None:
                continue
            if new.value <= max(current, history[number % LATE_ACCEPTANCE]):
                pattern, current = changed, new.value
            history[number % LATE_ACCEPTANCE] = current
            if new.value < best.value:
                best = new
        return best

    def _changed(self, pattern: Pattern) -> Pattern | None:
        """Return a pattern with some offsets changed; None if an I would come before its F, or a W
        before its I."""
        rng, stages, period = self.rng, self.problem.stages, pattern.period
        offsets = list(pattern.offsets)
        for _ in range(rng.choice((1, 1, 2, 3))):
            shift = rng.gauss(0, 0.3) * period
            what = rng.randrange(3)
            if what == 0:  # a part of the chain, with its weight gradients
                for stream in self.chain[rng.randrange(len(self.chain)) :]:
                    offsets[stream] += shift
                    if stages <= stream < len(offsets) - stages:
                        offsets[stream + stages] += shift
            elif what == 1:
                offsets[rng.randrange(len(offsets))] += shift
            else:  # next to another stream
                moved, other = rng.sample(rng.choice(self.streams), 2)
                periods = round((offsets[moved] - offsets[other]) / period)
                aside = rng.choice((-1e-4, 1e-4))
                offsets[moved] = offsets[other] + (periods + aside) * period
        rows = zip(offsets, offsets[stages:], strict=False)
        return Pattern(offsets, period) if all(a < b for a, b in rows) else None
