"""The data of steps to come, and how far they are consumed."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

from pydantic import JsonValue, PlainValidator

from megapipe.checkpoint.stateful import Stateful
from megapipe.engine.stage import Key
from megapipe.layers.microbatch import MicroBatch
from megapipe.optim.scaler import LossScaler
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader, Feed, LocalTokens
from megapipe.train.step.machine import Machine
from megapipe.util.left_out import SkippedSamples


class DataPosition(NamedTuple):
    """How far the data are consumed; every further step takes a global batch."""

    step: int
    """Steps done."""
    samples: int
    """Samples that they took."""


class StepData(Stateful):
    """Fetches the micro-batches of steps, in the order of the data."""

    name = "left_out"
    kind = Annotated[SkippedSamples, PlainValidator(SkippedSamples.stored)]

    def __init__(self, machine: Machine, feed: Feed, scaler: LossScaler) -> None:
        self._layout = machine.layout
        self._train = machine.config.train
        self._batches = self._train.batches
        self._feed = feed
        self._scaler = scaler
        self.schedule = machine.schedule
        """The schedule in force."""
        self.position = DataPosition(0, 0)
        self.left_out = SkippedSamples.of(machine.config.numbers.skip_samples)
        """Numbers of samples that no step takes."""

    def state(self) -> JsonValue:
        """The samples that are left out."""
        return [list[JsonValue](each) for each in self.left_out.ranges]

    def load(self, stored: SkippedSamples | None) -> None:
        """Leave out what a checkpoint says, at whose :attr:`position` this is, and of what is left
        out now what is not behind."""
        kept = stored or SkippedSamples()
        self.left_out = kept.going_on(self.left_out, self.position.samples)

    @property
    def samples_read(self) -> list[int]:
        """Numbers of the samples that first stages here were given last."""
        return self._feed.samples_read

    def samples(self, step: int) -> int:
        """Samples that the steps before `step` take; :attr:`left_out` has the numbers of others."""
        position = self.position
        return self._batches.after(position.samples, step - position.step)

    def schedule_of(self, step: int) -> Schedule:
        """The schedule for the batch of a step, which grows under ``train.batch_ramp``."""
        smaller, batch = self._layout.ramp_schedules, self._batches.batch_at(self.samples(step))
        if batch in smaller:
            return smaller[batch]
        return self._layout.schedule if self.schedule in smaller.values() else self.schedule

    def fetch(self, step: int, rows: BatchReader) -> tuple[dict[Key, MicroBatch], LocalTokens]:
        """Micro-batches of a step, and the unmasked tokens of the last stages here; begins to read
        those of the next step, if there will be one."""
        first, scale = self.samples(step), self._scaler.scale
        found = self._feed.fetch(self.schedule, rows, step, first, scale, self.left_out)
        if step + 1 < self._train.last_step:
            self._feed.read_ahead(*self._coming(step + 1, rows))
        return found

    def fetch_for(self, schedule: Schedule, step: int, rows: BatchReader) -> dict[Key, MicroBatch]:
        """Micro-batches of another schedule, of the samples of a step."""
        first = self.samples(step)
        microbatches, _ = self._feed.fetch(schedule, rows, step, first, 1.0, self.left_out)
        return microbatches

    def upload_ahead(self, step: int, rows: BatchReader) -> None:
        """While a GPU computes the step before, get the data of `step`, if there will be one."""
        if step < self._train.last_step:
            self._feed.upload_ahead(*self._coming(step, rows))

    def count_ahead(self, step: int, rows: BatchReader) -> float:
        """This rank's unmasked tokens of `step`, NaN if there will be none."""
        if step >= self._train.last_step:
            return math.nan
        return self._feed.count_ahead(*self._coming(step, rows))

    def know_total(self, total: float) -> None:
        """Take over what all ranks together have counted ahead."""
        self._feed.know_total(total)

    def _coming(
        self, step: int, rows: BatchReader
    ) -> tuple[Schedule, BatchReader, int, SkippedSamples]:
        """The schedule of a step and its place in the data."""
        return self.schedule_of(step), rows, self.samples(step), self.left_out
