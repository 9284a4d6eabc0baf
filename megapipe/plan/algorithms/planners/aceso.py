"""Aceso: relieve the bottleneck of a plan, again and again (Liu et al., EuroSys'24).

The bottleneck is the stage that needs too much memory, else the stage that takes longest. Moves
change that stage: give a unit to a neighbour, take devices from another stage, exchange tensor for
data parallelism, recompute more or less. Other moves change the number of micro-batches. If no move
helps, the next bottlenecks are relieved, then paths of several moves are tried, and at last another
start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from random import Random
from typing import NamedTuple

from megapipe.plan.algorithms.batch import microbatch_counts
from megapipe.plan.algorithms.judge import Judged, judge, stage_load
from megapipe.plan.algorithms.local_search import Trials, descend, from_starts
from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage, UnitChoice
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import Algorithm
from megapipe.plan.algorithms.stages import period, positions

MOVES = 200
"""Number of plans that are evaluated for each number of stages."""
HOPS = 3
"""Maximum length of a path of moves."""
TOO_LARGE = 1e12
"""Seconds of a plan that needs just over the memory of a device; more in proportion to more."""


class Part(NamedTuple):
    """Units of a stage with their number of devices; the devices follow from the order."""

    choices: tuple[UnitChoice, ...]
    devices: int


def pipeline(parts: list[Part], microbatches: int) -> PlannedPipeline:
    """Return the plan whose stages have these parts."""
    stages, first, device = [], 0, 0
    for choices, count in parts:
        stages.append(PlannedStage(first, choices, tuple(range(device, device + count))))
        first, device = first + len(choices), device + count
    return PlannedPipeline(tuple(stages), microbatches)


class Aceso:
    """The search for pipelines of one problem."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self._problem, self._random = problem, Random(seed)
        self._counts = microbatch_counts(problem)
        self._sized = cache(problem.with_microbatches)
        self._judged = cache(lambda plan: judge(self._sized(plan.microbatches), plan))

    def run(self, stages: int, limit: int = MOVES) -> Trials[PlannedPipeline]:
        """Search among plans of some number of stages, at first with equally many devices each.
        Evaluate at most `limit` plans."""
        trials = Trials(self._cost, limit)
        starts = self._starts(stages, limit)
        from_starts(trials, starts, lambda start: descend(trials, start, self._moves, HOPS))
        return trials

    def fits(self, plan: PlannedPipeline) -> bool:
        """Whether a plan fits the devices."""
        return self._judged(plan).fits

    def _is_allowed(self, plan: PlannedPipeline) -> bool:
        return plan.mistake(self._sized(plan.microbatches)) is None

    def _cost(self, plan: PlannedPipeline) -> float | None:
        if not self._is_allowed(plan):
            return None
        found: Judged = self._judged(plan)
        return found.seconds if found.fits else TOO_LARGE * max(found.peaks) / self._problem.memory

    def _starts(self, stages: int, limit: int) -> Iterator[PlannedPipeline]:
        """Yield an even plan without recomputation, then plans with random cuts in which each unit
        recomputes or not at random; each with another number of micro-batches."""
        ends = positions(self._problem)
        inner, tp = ends[1:-1], self._problem.tensor_sizes[0]
        even = [inner[index * len(inner) // stages] for index in range(1, stages)]
        for number in range(limit):
            cuts = sorted(self._random.sample(inner, stages - 1)) if number else even
            parts, count = [], self._problem.devices // stages
            for first, last in pairwise((0, *cuts, ends[-1])):
                again = [number > 0 and self._random.random() < 0.5 for _ in range(first, last)]
                parts.append(Part(tuple(UnitChoice(tp, each) for each in again), count))
            plans = (pipeline(parts, microbatches) for microbatches in reversed(self._counts))
            allowed = [
                plan for plan in plans if plan.mistake(self._sized(plan.microbatches)) is None
            ]
            yield allowed[number % len(allowed)] if allowed else pipeline(parts, self._counts[-1])

    def _bottlenecks(self, plan: PlannedPipeline) -> list[int]:
        """Return the stages, the one to relieve first before the others."""
        problem, judged = self._sized(plan.microbatches), self._judged(plan)
        loads = [stage_load(problem, each) for each in plan.stages]
        usage = [period(problem, each) for each in loads] if judged.fits else judged.peaks
        return sorted(range(len(loads)), key=usage.__getitem__, reverse=True)

    def _moves(self, plan: PlannedPipeline) -> Iterator[PlannedPipeline]:
        """Yield the plans that relieve the first bottleneck, those that relieve the next ones, and
        those with other micro-batches."""
        if not self._is_allowed(plan):
            return
        parts = [Part(each.choices, len(each.devices)) for each in plan.stages]
        for worst in self._bottlenecks(plan):
            for changes in (
                *self._units(parts, worst),
                *self._tensor(parts, worst),
                *self._recomputation(parts, worst),
                *self._devices(parts, worst),
            ):
                changed = [changes.get(index, part) for index, part in enumerate(parts)]
                yield pipeline(changed, plan.microbatches)
        place = bisect_left(self._counts, plan.microbatches)
        near = self._counts[max(0, place - 1) : place] + self._counts[place + 1 : place + 2]
        yield from (pipeline(parts, count) for count in near)

    def _units(self, parts: list[Part], worst: int) -> Iterator[dict[int, Part]]:
        """Move the units up to the next cut to a neighbour."""
        start = sum(len(part.choices) for part in parts[:worst])
        own, count = parts[worst]
        cuts = [cut - start for cut in positions(self._problem) if 0 < cut - start < len(own)]
        if cuts and worst > 0:
            before = parts[worst - 1]
            moved = tuple(each._replace(tp=before.choices[0].tp) for each in own[: cuts[0]])
            longer = before._replace(choices=before.choices + moved)
            yield {worst - 1: longer, worst: Part(own[cuts[0] :], count)}
        if cuts and worst + 1 < len(parts):
            after = parts[worst + 1]
            moved = tuple(each._replace(tp=after.choices[0].tp) for each in own[cuts[-1] :])
            longer = after._replace(choices=moved + after.choices)
            yield {worst: Part(own[: cuts[-1]], count), worst + 1: longer}

    def _tensor(self, parts: list[Part], worst: int) -> Iterator[dict[int, Part]]:
        """Exchange tensor for data parallelism within the stage."""
        own = parts[worst]
        for tp in self._problem.tensor_sizes:
            if tp != own.choices[0].tp and own.devices % tp == 0:
                choices = tuple(each._replace(tp=tp) for each in own.choices)
                yield {worst: own._replace(choices=choices)}

    def _recomputation(self, parts: list[Part], worst: int) -> Iterator[dict[int, Part]]:
        """Recompute one unit more or one less, or all units, or none."""
        own = parts[worst]
        every = [tuple(each._replace(recompute=on) for each in own.choices) for on in (False, True)]
        for index, each in enumerate(own.choices):
            flipped = each._replace(recompute=not each.recompute)
            every.append((*own.choices[:index], flipped, *own.choices[index + 1 :]))
        yield from ({worst: own._replace(choices=each)} for each in dict.fromkeys(every))

    def _devices(self, parts: list[Part], worst: int) -> Iterator[dict[int, Part]]:
        """Take half of the devices of another stage."""
        own = parts[worst]
        for index, part in enumerate(parts):
            if index != worst and part.devices % (2 * part.choices[0].tp) == 0:
                half = part.devices // 2
                more = own._replace(devices=own.devices + half)
                yield {worst: more, index: part._replace(devices=half)}


def plan(problem: Problem) -> PlannedPipeline | None:
    """Return the best plan over all numbers of stages that divide the devices, as Aceso searches
    each number apart."""
    search, most = Aceso(problem), len(positions(problem)) - 1
    counts = [count for count in range(1, most + 1) if problem.devices % count == 0]
    found = [search.run(count) for count in counts]
    best = min(found, key=lambda trials: trials.least).best
    return best if best is not None and search.fits(best) else None


ALGORITHMS = (
    Algorithm(
        "aceso", "Aceso (Liu et al., EuroSys'24)", "simulated step time", plan, enumerates=True
    ),
)
