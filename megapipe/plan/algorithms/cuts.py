"""Dynamic programming over the cuts of a chain: the core of most published planners.

The program walks over positions of the chain, from its end to its start if the memory of a stage
depends on the stages after it. A *step* adds a stage between two positions. Its state says what
later steps must know, such as the number of devices that are left. Each step adds to a total and
can raise a maximum, so any objective that grows with both is minimized exactly: a pipeline takes
about total + (micro-batches - 1) x maximum. Of the partitions that reach the same position and
state, those are kept that no other beats in both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from megapipe.plan.algorithms.pipeline import PlannedPipeline, PlannedStage
from megapipe.plan.algorithms.problem import Problem


class Step(NamedTuple):
    """A stage that a partition may have next."""

    state: Hashable
    """State after the step."""
    total: float
    """Addition to the total: usually the seconds of a micro-batch, there and back."""
    slowest: float
    """Lower limit of the maximum: usually the seconds between two micro-batches."""
    stage: PlannedStage


class Partition(NamedTuple):
    """Stages of a part of the chain."""

    total: float
    """Sum over the stages."""
    slowest: float
    """Maximum over the stages."""
    links: tuple[PlannedStage, object] | None = None
    """The stage that was added last, and the links of the partition before it."""

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """Stages in the order of the model."""
        found, rest = list[PlannedStage](), self.links
        while rest is not None:
            added, rest = rest  # type: ignore[assignment]
            found.append(added)
        return tuple(sorted(found, key=lambda each: each.first))

    def seconds(self, microbatches: int) -> float:
        """Return the time of a pipeline in closed form: one micro-batch passes all stages, the
        others follow at the intervals of the slowest stage."""
        return self.total + (microbatches - 1) * self.slowest

    def plan(self, problem: Problem) -> PlannedPipeline:
        """Return the plan of the whole chain, with the schedule 1F1B."""
        return PlannedPipeline(self.stages, problem.microbatches)


Steps = Callable[[int, int, Hashable], Iterable[Step]]
"""Function of a position, of the next one, and of the state at the first of them."""


def partitions(
    positions: Sequence[int], start: Hashable, steps: Steps, limit: float = inf
) -> Mapping[Hashable, list[Partition]]:
    """Return, by final state, the best partitions of the chain between the first and the last of
    the positions. `limit`: maximum that no partition may exceed."""
    return by_position(positions, start, steps, limit)[-1]


def by_position(
    positions: Sequence[int], start: Hashable, steps: Steps, limit: float = inf
) -> list[dict[Hashable, list[Partition]]]:
    """Return, for each position and state, the best partitions from the first position to it."""
    table: list[dict[Hashable, list[Partition]]] = [{} for _ in positions]
    table[0][start] = [Partition(0.0, 0.0)]
    for index, position in enumerate(positions):
        for state, found in table[index].items():
            table[index][state] = found = front(found)
            for further in range(index + 1, len(positions)):
                for step in steps(position, positions[further], state):
                    if step.slowest <= limit:
                        _extend(found, step, table[further].setdefault(step.state, []))
    return table


def _extend(found: Iterable[Partition], step: Step, reached: list[Partition]) -> None:
    """Add a step to partitions; put those into `reached` that do not follow a better one."""
    for each in found:
        total, slowest = each.total + step.total, max(each.slowest, step.slowest)
        if not reached or total < reached[-1].total or slowest < reached[-1].slowest:
            reached.append(Partition(total, slowest, (step.stage, each.links)))


def front(found: Iterable[Partition]) -> list[Partition]:
    """Return the partitions that no other beats in total and maximum, by ascending total."""
    kept: list[Partition] = []
    for each in sorted(found, key=lambda partition: partition[:2]):
        if not kept or each.slowest < kept[-1].slowest:
            kept.append(each)
    return kept


def shortest(found: Iterable[Partition], microbatches: int) -> Partition | None:
    """Return the partition with the least time in closed form; None if there is none."""
    return min(found, key=lambda each: (each.seconds(microbatches), each.slowest), default=None)


def widened(
    search: Callable[[float], Iterable[Partition]], least: float, microbatches: int
) -> Partition | None:
    """Return the partition with the least time in closed form, searched with as low a limit of the
    maximum as possible; None if there is none.

    `search` returns the best partitions whose maximum is within its argument; no partition has a
    maximum below `least`. A partition that takes T proves that the maximum of a better one is
    below T / micro-batches, because the total is at least the maximum.
    """
    limit = 1.05 * least
    while True:
        found = shortest(search(limit), microbatches)
        needed = inf if found is None else found.seconds(microbatches) / microbatches
        if needed <= limit or limit == inf:
            return found
        limit = needed if found is not None else 1.3 * limit if limit < 20 * least else inf
