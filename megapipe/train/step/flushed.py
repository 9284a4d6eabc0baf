"""A training step on a page. Read this first.

A step is::

    fetch micro-batches -> run the pipeline program, which starts reducing each stage's gradients
    when they are complete -> sum norms, losses and the tokens of the next step over all
    ranks, once -> clip, update -> start the all-gather of the new weights

Gradients are accumulated over the pipeline's micro-batches; without pipeline parallelism too. The
loss is the sum of token losses over the global batch, divided by its number of unmasked tokens.
Each micro-batch divides its sum by that global count, so gradients only ever need adding.
"""

from __future__ import annotations

from functools import partial

from megapipe.engine.executor import Executor
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader
from megapipe.train.step.data import StepData
from megapipe.train.step.local_stats import StepTotals
from megapipe.train.step.machine import Machine
from megapipe.train.step.stepper import Asked, Executors, Watch
from megapipe.train.step_stats import RankRequests, StepStats
from megapipe.train.update import StepResult, Update
from megapipe.watch.journal import text

READING = text("reading samples")


class FlushedSteps:
    """Takes steps with a pipeline flush: at the end of a step nothing is in flight."""

    def __init__(
        self, machine: Machine, data: StepData, totals: StepTotals, update: Update
    ) -> None:
        self._machine = machine
        self._data = data
        self._totals = totals
        self._update = update
        self.executors = Executors(machine)

    def train(
        self, step: int, rows: BatchReader, requests: Asked, watch: Watch
    ) -> list[StepResult]:
        """Compute the gradients of a step, and update the weights."""
        totals = self._compute(self.executors.of(watch), step, rows, requests)
        replay = partial(self._compute, self.executors.plain, step, rows, RankRequests)
        return [self._update.apply(step, totals, replay)]

    def _compute(
        self, executors: list[Executor], step: int, rows: BatchReader, requests: Asked
    ) -> StepStats:
        """Compute and reduce the gradients of a step; return the step's totals over all ranks."""
        machine, data = self._machine, self._data
        machine.mesh.journal.set_activity(READING)
        microbatches, counted = data.fetch(step, rows)
        machine.optimizer.zero_grad()
        machine.pipeline.run(executors, microbatches)
        data.upload_ahead(step + 1, rows)
        machine.mesh.journal.set_activity(READING)
        totals = self._totals.whole(counted, requests, data.count_ahead(step + 1, rows))
        data.know_total(totals.ahead)
        return totals

    def settle(self) -> list[StepResult]:
        """Return no results: each step is complete when :meth:`train` returns."""
        return []

    def drop(self) -> None:
        """Do nothing: each step is complete when :meth:`train` returns."""

    def use_schedule(self, schedule: Schedule) -> None:
        """Switch to another schedule."""
        self.executors.use_schedule(schedule)

    @property
    def samples_read(self) -> list[int]:
        """Global indices of the last step's samples on local first stages."""
        return self._data.samples_read
