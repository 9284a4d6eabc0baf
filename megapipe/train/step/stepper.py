"""Interface of the objects that take optimizer steps: flushed, post-validated or no-flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from megapipe.engine.executor import Executor
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader
from megapipe.train.step.machine import Machine
from megapipe.train.step_stats import RankRequests
from megapipe.train.update import StepResult

Asked = Callable[[], RankRequests]
"""Function that returns this rank's requests at the end of a step."""


class Watch(NamedTuple):
    """Requests to observe a step."""

    record: bool = False
    """Whether to record when each operation runs."""
    name: bool = False
    """Whether to name each action for a profiler."""


PLAIN = Watch()


class Stepper(Protocol):
    """Takes optimizer steps."""

    def train(
        self, step: int, rows: BatchReader, requests: Asked, watch: Watch
    ) -> list[StepResult]:
        """Take step `step`, counted from 0; return the newly known results, oldest first."""

    def settle(self) -> list[StepResult]:
        """Complete work in flight, so that weights and states are those after the last step. Return
        the results that become known."""

    def drop(self) -> None:
        """Drop work in flight, before weights and states of another step are loaded."""

    def use_schedule(self, schedule: Schedule) -> None:
        """Switch to another schedule, with nothing in flight."""

    @property
    def samples_read(self) -> list[int]:
        """Global indices of the last step's samples on local first stages."""


class Executors:
    """Executors of the schedule in force."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.use_schedule(machine.schedule)

    def use_schedule(self, schedule: Schedule) -> None:
        """Switch to another schedule."""
        self._schedule = schedule
        self._made = {PLAIN: self._machine.executors(schedule, train=True)}

    @property
    def plain(self) -> list[Executor]:
        """Executors that neither record nor name anything."""
        return self._made[PLAIN]

    def of(self, watch: Watch) -> list[Executor]:
        """Return executors for `watch`. If it requests anything, wait at a barrier of all ranks."""
        if watch == PLAIN:
            return self.plain
        if watch not in self._made:
            seen = self._machine.executors(self._schedule, train=True, **watch._asdict())
            self._made[watch] = seen
        self._machine.mesh.barrier()
        return self._made[watch]
