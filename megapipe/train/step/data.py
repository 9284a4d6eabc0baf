"""The micro-batches of each step, and the run's position in the data."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import JsonValue, PlainValidator

from megapipe.checkpoint.stateful import Stateful
from megapipe.engine.stage import Key
from megapipe.layers.microbatch import MicroBatch
from megapipe.optim.loss_scaler import LossScaler
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader, Feed, LocalTokens
from megapipe.train.step.machine import Machine
from megapipe.util.skipped_samples import SkippedSamples


class DataPosition(NamedTuple):
    """Steps done and samples consumed; every further step takes a global batch."""

    step: int
    """Number of steps done."""
    samples: int
    """Number of samples that these steps took."""


class StepData(Stateful):
    """Fetches the micro-batches of steps, in the order of the data."""

    name = "skipped_samples"
    kind = Annotated[SkippedSamples, PlainValidator(SkippedSamples.stored)]

    def __init__(self, machine: Machine, feed: Feed, scaler: LossScaler) -> None:
        self._layout = machine.layout
        self._train = machine.config.train
        self._batches = self._train.batches
        self._feed = feed
        self._scaler = scaler
        self.schedule = machine.schedule
        """Schedule in force."""
        self.position = DataPosition(0, 0)
        self.skipped_samples = SkippedSamples.of(machine.config.health.skip_samples)
        """Samples that no step takes."""

    def state(self) -> JsonValue:
        """Return the skipped samples."""
        return [list[JsonValue](each) for each in self.skipped_samples.ranges]

    def load(self, stored: SkippedSamples | None) -> None:
        """Skip the samples that a checkpoint lists, and configured samples that come after the
        checkpoint's :attr:`position`."""
        kept = stored or SkippedSamples()
        self.skipped_samples = kept.going_on(self.skipped_samples, self.position.samples)

    @property
    def samples_read(self) -> list[int]:
        """Global indices of the newest fetch's samples on local first stages."""
        return self._feed.samples_read

    def samples(self, step: int) -> int:
        """Return the number of samples of all steps before `step`, skipped samples left out."""
        position = self.position
        return self._batches.after(position.samples, step - position.step)

    def schedule_of(self, step: int) -> Schedule:
        """Return the schedule for a step's batch size, which grows under ``train.batch_ramp``."""
        smaller, batch = self._layout.ramp_schedules, self._batches.batch_at(self.samples(step))
        if batch in smaller:
            return smaller[batch]
        return self._layout.schedule if self.schedule in smaller.values() else self.schedule

    def fetch(self, step: int, rows: BatchReader) -> tuple[dict[Key, MicroBatch], LocalTokens]:
        """Fetch the micro-batches of a step, and count the unmasked tokens of local last stages.
        Start reading the samples of the next step, if there will be one."""
        first, scale = self.samples(step), self._scaler.scale
        found = self._feed.fetch(self.schedule, rows, step, first, scale, self.skipped_samples)
        if step + 1 < self._train.last_step:
            self._feed.read_ahead(*self._coming(step + 1, rows))
        return found

    def fetch_for(self, schedule: Schedule, step: int, rows: BatchReader) -> dict[Key, MicroBatch]:
        """Fetch the samples of a step as micro-batches of another schedule."""
        first = self.samples(step)
        microbatches, _ = self._feed.fetch(schedule, rows, step, first, 1.0, self.skipped_samples)
        return microbatches

    def upload_ahead(self, step: int, rows: BatchReader) -> None:
        """Start copying the data of `step`, if it exists, to a GPU during the previous step."""
        if step < self._train.last_step:
            self._feed.upload_ahead(*self._coming(step, rows))

    def count_ahead(self, step: int, rows: BatchReader) -> float:
        """Count this rank's unmasked tokens of `step`; NaN if there will be no such step."""
        if step >= self._train.last_step:
            return math.nan
        return self._feed.count_ahead(*self._coming(step, rows))

    def know_total(self, total: float) -> None:
        """Store the next step's number of unmasked tokens: the sum of all :meth:`count_ahead`."""
        self._feed.know_total(total)

    def _coming(
        self, step: int, rows: BatchReader
    ) -> tuple[Schedule, BatchReader, int, SkippedSamples]:
        """Return the schedule of a step, the reader, and the step's position in the data."""
        return self.schedule_of(step), rows, self.samples(step), self.skipped_samples
