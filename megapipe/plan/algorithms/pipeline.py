"""The result of a planner: stages of units on devices, and a schedule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.plan.algorithms.problem import Problem
from megapipe.schedule.ir import Schedule


class UnitChoice(NamedTuple):
    """How a unit is computed on the devices of its stage."""

    tp: int = 1
    """Tensor-parallel degree; the stage's devices form replicas of this size."""
    recompute: bool = False
    """Whether the backward recomputes the unit's forward."""


class PlannedStage(NamedTuple):
    """Consecutive units on a set of devices."""

    first: int
    """Index of the first unit."""
    choices: tuple[UnitChoice, ...]
    """One for each unit."""
    devices: tuple[int, ...]
    """Devices of the stage; tensor-parallel groups are consecutive ones."""

    @property
    def last(self) -> int:
        """Index after the last unit."""
        return self.first + len(self.choices)

    def replicas(self, unit: int) -> int:
        """Return the number of replicas of a unit, by its index in the problem."""
        return len(self.devices) // self.choices[unit - self.first].tp

    @property
    def is_uniform(self) -> bool:
        """Whether all units have the same tensor-parallel degree."""
        return len({choice.tp for choice in self.choices}) == 1


def stage(
    first: int,
    last: int,
    devices: Sequence[int],
    tp: int = 1,
    recompute: bool | Collection[int] = False,
) -> PlannedStage:
    """Make a stage of units `first` to `last` - 1. `recompute`: all of them, none, or the indices
    of those that recompute."""
    if isinstance(recompute, bool):
        choices = (UnitChoice(tp, recompute),) * (last - first)
    else:
        choices = tuple(UnitChoice(tp, unit in recompute) for unit in range(first, last))
    return PlannedStage(first, choices, tuple(devices))


@dataclass(frozen=True)
class PlannedPipeline:
    """A plan: where each unit runs, in which order micro-batches pass, and how many there are."""

    stages: tuple[PlannedStage, ...]
    """Stages in the order of the model. Several stages on the same devices are model chunks."""
    microbatches: int
    """Number of micro-batches of a step."""
    schedule: str | Schedule = "1f1b"
    """Name of a registered schedule, or one that the planner made. Its ranks are the different
    sets of devices, in the order in which the stages first use them."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Sets of devices that hold stages: one for each pipeline rank."""
        return tuple(dict.fromkeys(each.devices for each in self.stages))

    @property
    def cuts(self) -> tuple[int, ...]:
        """Positions between stages; cut k is before unit k."""
        return tuple(each.first for each in self.stages[1:])

    def mistake(self, problem: Problem) -> str | None:
        """Say why this is no plan of a problem; None if it is one."""
        covered = [unit for each in self.stages for unit in range(each.first, each.last)]
        if covered != list(range(problem.length)) or not all(each.choices for each in self.stages):
            return f"its stages have units {covered} instead of 0 to {problem.length - 1}, in order"
        used = [device for group in self.groups for device in group]
        if len(set(used)) < len(used) or not set(used) <= set(range(problem.devices)):
            return f"its stages share devices, or have others than 0 to {problem.devices - 1}"
        for each in self.stages:
            for unit, choice in enumerate(each.choices, each.first):
                if choice.tp not in problem.tensor_sizes or len(each.devices) % choice.tp:
                    return f"unit {unit} cannot be split over {choice.tp} of its devices"
                if each.replicas(unit) not in problem.replica_counts:
                    return f"unit {unit} has {each.replicas(unit)} replicas for a micro-batch"
        return None
