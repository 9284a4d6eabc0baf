"""No-flush training: each step runs one update window of an asynchronous schedule
(docs/streams.md).

A step ends at a cut: every rank has finished its last backward of the step's update window, and
forwards of later windows are in flight. Each stage is updated within the program, at the schedule's
position. A rank starts the all-reduce of a window's totals when it has finished the window. It
reads the result some steps later, when all other ranks have finished the window too. So no rank
waits, but a step's result is known some steps late. At a pause, such as before a save, pending
updates are made and messages in flight are received. Then all stages have the same weight version.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from megapipe.checkpoint.stateful import Stateful, TensorReader
from megapipe.distributed.axis import Axis
from megapipe.engine.async_runner import run_parts
from megapipe.engine.recorder import Record
from megapipe.engine.stage import Key
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.partition import format_layout
from megapipe.observe.timeline import RecordedWindow
from megapipe.optim.shard import Shard
from megapipe.optim.velocity import predict_older_weights
from megapipe.optim.weight_prediction import predict
from megapipe.optim.weight_versions import WeightVersions
from megapipe.schedule.async_schedules.async_schedule import (
    AsyncSchedule,
    mean_staleness,
    predictions_kept,
    versions_kept,
)
from megapipe.schedule.async_schedules.programs import ProgramSegment, Runs
from megapipe.schedule.ir import Read, Schedule
from megapipe.train.anomaly_detection import ADVICE, BadStep
from megapipe.train.async_training.recording import Recording
from megapipe.train.checkpoint_io import read_region
from megapipe.train.feed import BatchReader, LocalTokens
from megapipe.train.step.data import StepData
from megapipe.train.step.local_stats import StepTotals, local_loss, local_step_stats
from megapipe.train.step.machine import Machine
from megapipe.train.step.stepper import PLAIN, Asked, Watch
from megapipe.train.step_stats import LARGEST, StepStats
from megapipe.train.update import StepResult, Update


class _Window(NamedTuple):
    """Micro-batches of an update window, with their token counts and global sample indices."""

    microbatches: Mapping[Key, MicroBatch]
    counted: LocalTokens
    samples: list[int]


def holders_of(machine: Machine) -> Axis:
    """Return the axis of the ranks of this replica that hold this rank's stage."""
    stages = machine.placement.stages_of(machine.pipeline.ranks[0])
    holders = machine.placement.holders(stages[0])
    if machine.pipeline.in_process or len(holders) == 1:
        return Axis.alone(machine.mesh.rank)
    return machine.mesh.holders_of(holders)


class AsyncTraining(Stateful):
    """Trains the no-flush schedule `stream`, one update window per step. `holders` are the ranks of
    this replica that hold this rank's stage."""

    name = "async_schedule"
    kind = str

    def __init__(
        self,
        machine: Machine,
        stream: AsyncSchedule,
        data: StepData,
        totals: StepTotals,
        update: Update,
        holders: Axis,
    ) -> None:
        self._machine = machine
        self._stream = stream
        self._data = data
        self._update = update
        self._step_totals = totals
        self._holders = holders
        self._runs = Runs(stream)
        self._late = stream.policy.late
        self._stages = sorted(machine.stages)
        self._behind = mean_staleness(stream)
        self._tied = machine.placement.stages
        """Bucket index of the tied embedding."""
        self._of_bucket: dict[int, list[WeightVersions]] = defaultdict(list)
        """Weight versions by bucket index."""
        self._versions: dict[int, list[WeightVersions]] = defaultdict(list)
        """Weight versions by stage, including those of the tied embedding."""
        self._make_versions()
        self._flows = machine.pipeline.flows(
            machine.stages,
            self,
            window=stream.microbatches,
            shape=machine.messages.of_schedule(machine.schedule),
            agree=stream.policy.agrees,
        )
        self._synchronous = machine.config.pipeline.synchronous_steps or 0
        """Number of first steps that flush the pipeline, so that they read no stale weights."""
        self.recording = Recording(stream, [flow.recorder for flow in self._flows])
        self._delay = stream.ahead
        """Number of update windows between a window's end and the reading of its totals."""
        self._windows: dict[int, _Window] = {}
        """Data of the current update window, which may be complete, and of later ones in flight."""
        self._older: dict[WeightVersions, int] = {}
        """Number of weight versions, besides the newest, that were loaded from a checkpoint."""
        self._loaded = ""
        """Value of :attr:`key` in the loaded checkpoint."""
        self._first: int | None = None
        """First update window since the pipeline was filled; None: it must be filled."""
        self._last = 0
        """Exclusive end of the update windows that run before the pipeline drains."""
        self._now = 0
        """Update window whose program segment is running, or was the last to run."""
        self._made: dict[int, int] = {}
        """Number of updates so far, by stage."""
        self._through: dict[tuple[int, int], set[int]] = defaultdict(set)
        """Local pipeline ranks that have finished a window at a stage, by (stage, window)."""
        self._squares = torch.empty(0)
        """Squared gradient norms of the window: of each stage, then of the tied embedding."""
        self._pending: deque[tuple[int, Callable[[], Tensor]]] = deque()
        """Update windows without known results, each with a function that awaits its totals."""
        self._totals: dict[int, StepStats] = {}
        """Totals that have been read, by update window; only of the newest windows."""
        self._paused = False
        self._part: tuple[ProgramSegment, ...] = ()
        """Program segments that ran last, one per pipeline rank."""

    def _make_versions(self) -> None:
        kept, predicted = versions_kept(self._stream), predictions_kept(self._stream)
        for shard in self._machine.optimizer.shards:
            index = shard.bucket.index
            stages = {0, self._tied - 1} if index == self._tied else {index}
            versions = WeightVersions(
                shard,
                max(kept[stage] for stage in stages),
                turns=self._late,
                predicted=max(predicted.get(stage, 0) for stage in stages),
                predict=self._predict,
            )
            self._of_bucket[index].append(versions)
            for stage in stages.intersection(self._stages):
                self._versions[stage].append(versions)

    @property
    def samples_read(self) -> list[int]:
        """Global indices of the current update window's samples on local first stages."""
        return self._windows[self._now].samples

    def drop(self) -> None:
        """Drop all work in flight; the next step refills the pipeline from the optimizer."""
        assert self._first is None or self._paused, "the pipeline is not flushed"
        self._first = None
        self._older.clear()
        self._windows.clear()
        self._pending.clear()
        self._totals.clear()

    @property
    def key(self) -> str:
        """Text that names schedule and stage layout. Run and checkpoint must share it, or older
        weight versions are not loaded."""
        ahead = "+".join(str(len(fill)) for fill in self._stream.fill)
        size, layout = self._stream.microbatches, format_layout(self._machine.layout.stage_layers)
        return f"{self._stream.name}, {ahead} ahead of {size} micro-batches, {layout}"

    @property
    def continues(self) -> bool:
        """Whether the next update window computes what an uninterrupted run would compute: the
        older weight versions that forwards in flight have read were loaded, or are not needed."""
        return bool(self._older) or not self._stream.policy.follows or self._begins_empty

    def forgets(self, steps: int) -> bool:
        """Whether a save after `steps` steps makes the run repeat the forwards in flight."""
        return not self._stream.policy.follows and steps > self._synchronous

    @property
    def _begins_empty(self) -> bool:
        """Whether the next step begins with an empty pipeline even in an uninterrupted run."""
        return self._data.position.step <= self._synchronous

    def state(self) -> JsonValue:
        """Return the :attr:`key`."""
        return self.key

    def load(self, stored: str | None) -> None:
        """Store the :attr:`key` of a checkpoint; :meth:`read` compares it with this run's."""
        self._loaded = stored or ""

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Load the older weight versions from a checkpoint whose :attr:`key` is equal. Then the
        forwards that fill the pipeline read the same versions as before the save."""
        if self._loaded != self.key or self._begins_empty:
            return
        for each in self.versions():
            bucket, loaded = each.shard.bucket, 0
            for age, buffer in enumerate(each.weights[1:], start=1):
                kind = f"stash.{age}"
                if f"{kind}/{bucket.entries[0].spec.name}" not in names:
                    break
                for entry in bucket.entries:
                    out = torch.zeros(entry.spec.sizes, dtype=buffer.dtype)
                    read_region(weights, kind, entry.spec, out)
                    bucket.view(buffer, entry).copy_(out)
                loaded = age
            self._older[each] = loaded

    def train(
        self, step: int, rows: BatchReader, requests: Asked, watch: Watch
    ) -> list[StepResult]:
        """Run update window `step`, counted from 0. Return the results that have become known. If
        `watch` asks for a record of the window, :meth:`recorded` returns it later."""
        if self._first is None:
            self._begin(step, rows)
        elif self._paused:
            self._go_on()
        first = self._first or 0
        self._now = step
        self._fetch(rows)
        for each in self.versions():
            each.shard.expect_gradients()
        self._part = self._runs.part(step - first, self._last - first)
        if watch.record:
            self.recording.take(step, self._part)
        self._run(self._part, watch)
        results = self._cut(requests)
        return [*results, *self._flush()] if step < self._synchronous else results

    def recorded(self, window: int, records: Sequence[Record]) -> RecordedWindow | None:
        """Return a recorded update window with its neighbours; None if the pipeline was refilled
        since. `records` has the records of all ranks."""
        return self.recording.window(window, records)

    def _begin(self, step: int, rows: BatchReader) -> None:
        """Fill the pipeline: run the forwards that are in flight when window `step` begins."""
        self._first = self._now = step
        self._last = self._machine.config.train.last_step
        if step < self._synchronous:
            self._last = step + 1
        self.recording.begin(step, self._last)
        self._paused = False
        self._made = dict.fromkeys(self._stages, step)
        self._zero_squares()
        self._machine.optimizer.zero_grad()
        for each in self.versions():
            each.begin(step, self._older.get(each, 0))
        self._older.clear()
        for flow in self._flows:
            flow.begin()
        self._fetch(rows)
        self._run(self._runs.of(self._last - step).fill)

    def versions(self) -> list[WeightVersions]:
        """Return the weight versions of all buckets of this process."""
        return [each for own in self._of_bucket.values() for each in own]

    def _fetch(self, rows: BatchReader) -> None:
        """Fetch the data of all windows that have operations in the current segment."""
        self._windows.pop(self._now - 1, None)
        end = min(self._now + self._stream.ahead + 1, self._last)
        for window in range(self._now, end):
            if window not in self._windows:
                microbatches, counted = self._data.fetch(window, rows)
                samples = self._data.samples_read
                self._windows[window] = _Window(microbatches, counted, samples)

    def _run(self, by_rank: tuple[ProgramSegment, ...], watch: Watch = PLAIN) -> None:
        size = self._stream.microbatches
        microbatches = {
            ((window - self._now) * size + number, part): microbatch
            for window, data in self._windows.items()
            for (number, part), microbatch in data.microbatches.items()
        }
        parts = [by_rank[rank] for rank in self._machine.pipeline.ranks]
        run_parts(self._flows, parts, microbatches, **watch._asdict())

    def point_at(self, stage: int, read: Read) -> None:
        """Point a stage at the weights that its next operation reads."""
        if self._now < self._synchronous:
            read = Read(0)
        for each in self._versions[stage]:
            each.use(self._now + read.version, read.ahead)

    def version(self, read: Read) -> int:
        """Return the number of the weight version that `read` gets: the named or the oldest one."""
        first = self._versions[self._stages[0]][0]
        return max(self._now + read.version, first.oldest)

    def _predict(self, shard: Shard, updates: Fraction, count: int, out: Tensor) -> None:
        """Write the weights predicted `updates` updates after update `count` to `out`. If `updates`
        is negative, write an estimate of older weights."""
        if updates < 0:
            predict_older_weights(shard, float(-updates), out)
            return
        optimizer = self._machine.optimizer
        rate = self._lr(shard.bucket.index, count - 1) if count else 0.0
        distance = float(updates) * rate
        predict(optimizer.rule, shard, distance, count, out)

    def ready(self, stage: int, windows_before: int, rank: int) -> bool:
        """Record that pipeline rank `rank` has finished an update window at a stage. Return whether
        to update the stage now: once all local holders have finished it. With updates as late as
        possible they have, so it is always True."""
        window = self._now - windows_before
        through = self._through[stage, window]
        through.add(rank)
        here = set(self._machine.pipeline.ranks).intersection(
            self._machine.placement.holders(stage)
        )
        return self._late or through == here

    def update(self, stage: int, windows_before: int) -> None:
        """Update a stage with the gradients of the window `windows_before` windows before the
        current one, unless a pause or another local pipeline rank has done so."""
        window = self._now - windows_before
        if self._made[stage] > window:
            return
        self._through.pop((stage, window - 1), None)
        optimizer, update = self._machine.optimizer, self._update
        norm = self._norm_of_window(stage, window) if self._late else self._norm_of_stage(stage)
        if not math.isfinite(norm):
            raise BadStep(
                f"step {window + 1}: gradients of stage {stage} are not finite; {ADVICE}",
                window,
                rewinds=False,
            )
        lr, factor = self._lr(stage, window), update.clipping(norm)
        for index in self._updated_with(stage):
            for each in self._of_bucket[index]:
                each.advance()
            optimizer.update_stage(index, lr, factor, window)
        self._made[stage] = window + 1
        update.made, optimizer.count = window, window + 1
        if not self._late:
            for shard in optimizer.shards_of(stage):
                shard.zero_grad()

    def _updated_with(self, stage: int) -> Iterator[int]:
        """Yield the indices of the buckets that are updated or received together with a stage: the
        tied embedding's with the first stage if that is local, else with the last stage."""
        yield stage
        if self._tied in self._of_bucket and stage == (0 if 0 in self._stages else self._tied - 1):
            yield self._tied

    def _lr(self, stage: int, window: int) -> float:
        """Return the learning rate of a stage, reduced in the first windows with stale weights."""
        lr, steps = self._update.lr(window), self._machine.config.pipeline.lr_anneal_steps
        number = window - self._synchronous
        if steps is None or not 0 <= number < steps:
            return lr
        return lr / max(1.0, float(self._behind[stage])) ** (1 - number / steps)

    def _norm_of_stage(self, stage: int) -> float:
        """Return the norm of a stage's complete gradients, over all ranks that hold the stage."""
        optimizer = self._machine.optimizer
        optimizer.reduce_stage(stage)
        self._squares[stage] = optimizer.finish_stage(stage)
        own = self._squares[stage : stage + 1].cpu()
        total = self._machine.mesh.ordered_sum(own, "tp", "cp", "dp", self._holders)
        return math.sqrt(total.item())

    def _norm_of_window(self, stage: int, window: int) -> float:
        """Return the norm by which a stage's gradients of an update window are clipped; wait for
        all ranks to finish the window. Raises BadStep if values are not finite."""
        totals = self._totals_of(window)
        self._check(window, totals)
        if self._machine.config.optimizer.clip_scope == "stage":
            first = stage == 0  # stage 0 updates the tied embedding
            return math.sqrt(totals.squared_norms[stage] + first * totals.squared_norms[self._tied])
        return totals.norm

    def _cut(self, requests: Asked) -> list[StepResult]:
        """End the update window and start the sum of its totals; return the newly known results."""
        machine, window = self._machine, self._windows[self._now]
        if self._late:
            for index in self._of_bucket:
                machine.optimizer.reduce_stage(index)
            for index in self._of_bucket:
                self._squares[index] = machine.optimizer.finish_stage(index)
            for each in self.versions():
                each.switch_accumulator()
        loss = local_loss(machine, window.counted, self._stream.microbatches)
        own = local_step_stats(machine, self._squares, *loss, requests).pack()
        self._zero_squares()
        vector = machine.mesh.ordered_sum(own, "tp", "cp", "dp", largest=LARGEST)
        self._pending.append(
            (self._now, machine.mesh.start_ordered_sum(vector, "pp", largest=LARGEST))
        )
        for flow in self._flows:
            flow.cut()
        return self._results(self._now - self._delay)

    def _zero_squares(self) -> None:
        """Reset the squared norms of each stage, and of the tied embedding."""
        stages, device = self._machine.placement.stages, self._machine.mesh.device
        self._squares = torch.zeros(stages + 1, dtype=torch.float64, device=device)

    def _results(self, until: int) -> list[StepResult]:
        """Return the results of all update windows up to `until` that were not known yet."""
        found = []
        while self._pending and self._pending[0][0] <= until:
            window = self._pending[0][0]
            totals = self._totals_of(window)
            self._pending.popleft()
            self._check(window, totals)
            found.append(self._update.result(window, totals))
        return found

    def _totals_of(self, window: int) -> StepStats:
        """Return the totals of an update window; wait until all ranks have finished it."""
        if window not in self._totals:
            self._totals.pop(window - self._delay - 2, None)
            wait = dict(self._pending)[window]
            self._totals[window] = self._step_totals.unpack(wait())
        return self._totals[window]

    def _check(self, window: int, totals: StepStats) -> None:
        """Raise, on all ranks, if the figures of a window are not finite."""
        update = self._update
        if not math.isfinite(totals.states):
            raise update.states_not_finite()
        fault = update.judge.check(totals)
        if fault is not None:
            update.judge.act(window, fault)

    def use_schedule(self, schedule: Schedule) -> None:
        raise AssertionError("a stream has one schedule")

    def settle(self) -> list[StepResult]:
        """Make pending updates, and bring all ranks to the same cut, without messages in flight.
        Return newly known results. Until the next step the model has its newest weights."""
        if self._first is None or self._paused:
            return []
        if self._late:
            for stage in self._stages:
                self.update(stage, 0)
        results = self._results(self._now)
        for flow, rank in zip(self._flows, self._machine.pipeline.ranks, strict=True):
            flow.pause(self._part[rank].in_flight)
        for each in self.versions():
            each.use(self._now + 1)
        self._machine.optimizer.count = self._now + 1
        self._machine.optimizer.lr = self._update.lr(self._now)
        self._paused = True
        return results

    def _flush(self) -> list[StepResult]:
        """End a synchronous step: update all stages, and drop earlier weight versions."""
        results = self.settle()
        for each in self.versions():
            each.begin(self._now + 1)
        self._first = None
        return results

    def saved(self) -> None:
        """React to a save of the optimizer's state. If the weights that forwards in flight have
        read are not saved, repeat these forwards, as a run that resumes from the save does."""
        if not self._stream.policy.follows:
            self.drop()

    def _go_on(self) -> None:
        for flow in self._flows:
            flow.resume()
        self._paused = False
