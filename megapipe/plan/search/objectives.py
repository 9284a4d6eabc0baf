"""Objectives of a search for layouts: shortest step, least memory, least cost, ..."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.search.estimate import Estimate
from megapipe.plan.search.layouts import with_keys
from megapipe.plan.search.search import FoundLayouts, Progress, Search, nothing_fits

Objective = Literal["time", "memory", "cost", "gpus", "sequence"]
OBJECTIVES: dict[Objective, str] = {
    "time": "shortest step",
    "memory": "least memory",
    "cost": "least cost of the run (--price)",
    "gpus": "fewest devices on which a layout fits, at most --gpus",
    "sequence": "longest train.sequence_length that fits",
}
EIGHTHS = 8
"""A longest sequence is a multiple of this fraction of the power of two below it."""
Searcher = Callable[[Config, int], Search]
"""A function that prepares the search for a number of devices."""


class Result(NamedTuple):
    """A search with what it found."""

    search: Search
    found: FoundLayouts


class Goal(NamedTuple):
    """The objective of a search, and its limits."""

    objective: Objective
    gpus: Sequence[int]
    """Numbers of devices; for the objective gpus the last one is the most."""
    top: int
    """Number of layouts to find."""
    with_front: bool
    """Whether slower layouts with less memory are found too."""

    def results(
        self, config: Config, searcher: Searcher, notify: Callable[[Progress], None]
    ) -> list[Result]:
        """Search; return the searches whose layouts answer the question.

        Raises:
            ConfigError: no layout fits.
        """

        def run(config: Config, gpus: int) -> Result:
            search = searcher(config, gpus)
            front = self.with_front or self.objective == "memory"
            return Result(search, search.run(self.top, notify, with_front=front))

        if self.objective == "gpus":
            return [_fewest(config, self.gpus[-1], run)]
        if self.objective == "sequence":
            return [_longest(config, self.gpus[-1], run)]
        results = list[Result]()
        for gpus in self.gpus:
            results.append(run(config, gpus))
            if not results[-1].found.complete:  # Ctrl-C
                return results
        if not any(each.found.best for each in results):
            raise ConfigError(nothing_fits(*results[-1]))
        return results

    def listed(self, results: Sequence[Result]) -> list[tuple[Result, Estimate]]:
        """Return the layouts to print, the best first."""
        if self.with_front:
            return [(each, one) for each in results for one in each.found.front]
        front = self.objective == "memory"
        every = [
            (each, one)
            for each in results
            for one in (each.found.front if front else each.found.best)
        ]
        return self.ordered(every)[: self.top]

    def ordered(self, layouts: Sequence[tuple[Result, Estimate]]) -> list[tuple[Result, Estimate]]:
        """Return layouts in the order of the objective, the best first."""

        def order(layout: tuple[Result, Estimate]) -> tuple[float, float]:
            result, found = layout
            if self.objective == "memory":
                return found.bytes, found.seconds
            if self.objective == "cost":
                return result.search.gpus / found.tokens_per_second, found.seconds
            return found.seconds, found.bytes

        return sorted(layouts, key=order)


Run = Callable[[Config, int], Result]


def _fewest(config: Config, most: int, run: Run) -> Result:
    """Return the search of the fewest devices on which a layout fits."""
    last: Result | None = None
    refusal: ConfigError | None = None
    for gpus in numbers_of_devices(most, config.parallel.ranks_per_node):
        try:
            last = run(config, gpus)
        except ConfigError as error:  # the batch or the heads cannot be split over so many
            refusal = error
            continue
        if last.found.best or not last.found.complete:
            return last
    if last is None and refusal is not None:
        raise refusal
    assert last is not None
    raise ConfigError(nothing_fits(*last))


def numbers_of_devices(most: int, of_node: int) -> Iterator[int]:
    """Yield the numbers of devices to try: the divisors of a node's number, then whole nodes."""
    yield from (number for number in range(1, min(of_node - 1, most) + 1) if of_node % number == 0)
    yield from range(of_node, most + 1, of_node)


def _longest(config: Config, gpus: int, run: Run) -> Result:
    """Return the search of the longest sequence that fits: doubled as long as a layout fits, then
    lengthened by eighths.

    Raises:
        ConfigError: not even the configured sequence fits, or the device's memory is unknown.
    """

    def at(length: int) -> Result:
        return run(with_keys(config, {"train.sequence_length": length}), gpus)

    length = config.train.sequence_length
    best = at(length)
    if best.search.speeds.plannable_bytes is None:
        raise ConfigError(
            "--objective sequence: the memory of the device is not known: expected plan.device_gb"
        )
    if not best.found.complete:
        return best
    if not best.found.best:
        raise ConfigError(nothing_fits(*best))
    while True:
        longer = at(2 * length)
        if not longer.found.complete:
            return best
        if not longer.found.best:
            break
        best, length = longer, 2 * length
    low, high = EIGHTHS, 2 * EIGHTHS
    while high - low > 1 and length % EIGHTHS == 0:
        middle = (low + high) // 2
        longer = at(length // EIGHTHS * middle)
        if not longer.found.complete:
            break
        low, high = (middle, high) if longer.found.best else (low, middle)
        best = longer if longer.found.best else best
    return best
