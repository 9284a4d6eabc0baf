"""The interface of all ways to take optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from megapipe.engine.executor import Executor
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader
from megapipe.train.step.machine import Machine
from megapipe.train.totals import Wishes
from megapipe.train.update import StepResult

Asked = Callable[[], Wishes]
"""Tells what this rank wants at the end of a step."""


class Watch(NamedTuple):
    """The parts of a step that are to be seen."""

    record: bool = False
    """When each operation runs."""
    name: bool = False
    """Names of actions, for a profiler."""


PLAIN = Watch()


class Stepper(Protocol):
    """Takes optimizer steps."""

    def train(self, step: int, rows: BatchReader, wishes: Asked, watch: Watch) -> list[StepResult]:
        """Take step `step`, counted from 0; returns the results that are known by now and were not
        before, oldest first."""

    def settle(self) -> list[StepResult]:
        """End what is under way; returns the results that were not known. Weights and states are
        then those after the last step."""

    def drop(self) -> None:
        """Forget what is under way: weights and states of another step take its place."""

    def use_schedule(self, schedule: Schedule) -> None:
        """Go on with another schedule; nothing is under way."""

    @property
    def samples_read(self) -> list[int]:
        """Numbers of the samples of the last step, as far as first stages here were given them."""


class Executors:
    """Executors of the schedule in force."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.use_schedule(machine.schedule)

    def use_schedule(self, schedule: Schedule) -> None:
        """Go on with another schedule."""
        self._schedule = schedule
        self._made = {PLAIN: self._machine.executors(schedule, train=True)}

    @property
    def plain(self) -> list[Executor]:
        """Those that show nothing."""
        return self._made[PLAIN]

    def of(self, watch: Watch) -> list[Executor]:
        """Those that show what is to be seen of a step, which all ranks then begin together."""
        if watch == PLAIN:
            return self.plain
        if watch not in self._made:
            seen = self._machine.executors(self._schedule, train=True, **watch._asdict())
            self._made[watch] = seen
        self._machine.mesh.barrier()
        return self._made[watch]
