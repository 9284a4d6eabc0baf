"""A training step on a page. Read this first.

A step is::

    fetch micro-batches -> run the pipeline program, which sends off each stage's gradients
    when they are complete -> add up norms, losses and the tokens of the next step over all
    ranks, once -> clip, update -> begin to gather the new weights

Gradient accumulation is the pipeline's micro-batches, so a single stage takes the same path. The
loss is the sum of token losses over the global batch by the number of unmasked tokens in it; each
micro-batch back-propagates its sum by that global count, so gradients only ever need adding.
"""

from __future__ import annotations

from functools import partial

from megapipe.engine.executor import Executor
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader
from megapipe.train.step.data import StepData
from megapipe.train.step.machine import Machine
from megapipe.train.step.own_totals import StepTotals
from megapipe.train.step.stepper import Asked, Executors, Watch
from megapipe.train.totals import StepStats, Wishes
from megapipe.train.update import StepResult, Update
from megapipe.watch.journal import text

READING = text("reading samples")


class FlushedSteps:
    """Takes steps at whose end the pipeline is empty."""

    def __init__(
        self, machine: Machine, data: StepData, totals: StepTotals, update: Update
    ) -> None:
        self._machine = machine
        self._data = data
        self._totals = totals
        self._update = update
        self.executors = Executors(machine)

    def train(self, step: int, rows: BatchReader, wishes: Asked, watch: Watch) -> list[StepResult]:
        """Compute the gradients of a step, and update."""
        totals = self._compute(self.executors.of(watch), step, rows, wishes)
        again = partial(self._compute, self.executors.plain, step, rows, Wishes)
        return [self._update.apply(step, totals, again)]

    def _compute(
        self, executors: list[Executor], step: int, rows: BatchReader, wishes: Asked
    ) -> StepStats:
        """Reduced gradients of a step; its totals of all ranks."""
        machine, data = self._machine, self._data
        machine.mesh.journal.set_activity(READING)
        microbatches, counted = data.fetch(step, rows)
        machine.optimizer.zero_grad()
        machine.pipeline.run(executors, microbatches)
        data.upload_ahead(step + 1, rows)
        machine.mesh.journal.set_activity(READING)
        totals = self._totals.whole(counted, wishes, data.count_ahead(step + 1, rows))
        data.know_total(totals.ahead)
        return totals

    def settle(self) -> list[StepResult]:
        """Nothing is ever under way."""
        return []

    def drop(self) -> None:
        """Nothing is ever under way."""

    def use_schedule(self, schedule: Schedule) -> None:
        """Go on with another schedule."""
        self.executors.use_schedule(schedule)

    @property
    def samples_read(self) -> list[int]:
        """Numbers of the samples of the last step, as far as first stages here were given them."""
        return self._data.samples_read
