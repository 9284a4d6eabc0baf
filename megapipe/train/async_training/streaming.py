"""Training without a flush: each step is a segment of a stream (docs/streams.md).

A step ends at a cut: every rank is through with its last backward of the step's window, and the
forwards of windows to come are in flight. Each stage is updated within the program, as the stream
has it. A rank begins to add up the totals of a window when it is through with it, and takes them
where all others are, so that nobody waits: results come some steps late. A pause makes the updates
that are pending, and takes in what is under way; then weights are of one version on all stages.
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
from megapipe.engine.flow import run_parts
from megapipe.engine.recorder import Record
from megapipe.engine.stage import Key
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.partition import format_layout
from megapipe.observe.timeline import RecordedWindow
from megapipe.optim.look_ahead import predict
from megapipe.optim.shard import Shard
from megapipe.optim.velocity import predict_older_weights
from megapipe.optim.versions import WeightVersions
from megapipe.schedule.ir import Read, Schedule
from megapipe.schedule.streams.programs import ProgramSegment, Runs
from megapipe.schedule.streams.stream import (
    AsyncSchedule,
    mean_staleness,
    predictions_kept,
    versions_kept,
)
from megapipe.train.async_training.recording import Recording
from megapipe.train.checkpoint_io import read_region
from megapipe.train.feed import BatchReader, LocalTokens
from megapipe.train.judge import ADVICE, BadStep
from megapipe.train.step.data import StepData
from megapipe.train.step.machine import Machine
from megapipe.train.step.own_totals import StepTotals, local_loss, local_step_stats
from megapipe.train.step.stepper import PLAIN, Asked, Watch
from megapipe.train.totals import LARGEST, StepStats
from megapipe.train.update import StepResult, Update


class _Window(NamedTuple):
    """The data of a window."""

    microbatches: Mapping[Key, MicroBatch]
    counted: LocalTokens
    samples: list[int]


def holders_of(machine: Machine) -> Axis:
    """The ranks of this replica that have the stage of this one, where it has one stage."""
    stages = machine.placement.stages_of(machine.pipeline.ranks[0])
    holders = machine.placement.holders(stages[0])
    if machine.pipeline.in_process or len(holders) == 1:
        return Axis.alone(machine.mesh.rank)
    return machine.mesh.holders_of(holders)


class AsyncTraining(Stateful):
    """Trains the windows of a stream; `holders` have the same stage."""

    name = "stream"
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
        """Number of the tied embedding among the buckets."""
        self._of_bucket: dict[int, list[WeightVersions]] = defaultdict(list)
        """By the number of the buckets."""
        self._versions: dict[int, list[WeightVersions]] = defaultdict(list)
        """Of all weights that a stage computes with, tied ones included."""
        self._make_versions()
        self._flows = machine.pipeline.flows(
            machine.stages,
            self,
            window=stream.microbatches,
            shape=machine.messages.of_schedule(machine.schedule),
            agree=stream.policy.agrees,
        )
        self._synchronous = machine.config.pipeline.synchronous_steps or 0
        """Steps at the beginning in which the pipeline runs dry, and nothing is stale."""
        self.recording = Recording(stream, [flow.recorder for flow in self._flows])
        self._delay = stream.ahead
        """Windows after which the totals of one are taken."""
        self._windows: dict[int, _Window] = {}
        """Those of which forwards are in flight, and the last one that is done."""
        self._older: dict[WeightVersions, int] = {}
        """How many versions before the optimizer's weights a checkpoint had."""
        self._loaded = ""
        """The :attr:`key` that a checkpoint had."""
        self._first: int | None = None
        """The window with which the pipeline was filled; None: that is yet to be done."""
        self._last = 0
        """The window before which it runs dry."""
        self._now = 0
        """The window whose segment runs, or ran last."""
        self._made: dict[int, int] = {}
        """By stage, its updates so far."""
        self._through: dict[tuple[int, int], set[int]] = defaultdict(set)
        """By stage and window, the pipeline ranks here that are to update the stage by it."""
        self._squares = torch.empty(0)
        """Of the window's gradients, on this rank."""
        self._pending: deque[tuple[int, Callable[[], Tensor]]] = deque()
        """Windows whose results are not known, with a wait for their totals."""
        self._totals: dict[int, StepStats] = {}
        """Totals that have been taken, of the last windows."""
        self._paused = False
        self._part: tuple[ProgramSegment, ...] = ()
        """The segments that ran last."""

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
        """Numbers of the last window's samples, as far as first stages here were given them."""
        return self._windows[self._now].samples

    def drop(self) -> None:
        """Begin anew with the next window, with the optimizer's weights and nothing in flight."""
        assert self._first is None or self._paused, "the stream is not paused"
        self._first = None
        self._older.clear()
        self._windows.clear()
        self._pending.clear()
        self._totals.clear()

    @property
    def key(self) -> str:
        """Names what has to be the same for a run to go on with a checkpoint's older versions."""
        ahead = "+".join(str(len(fill)) for fill in self._stream.fill)
        size, layout = self._stream.microbatches, format_layout(self._machine.layout.stage_layers)
        return f"{self._stream.name}, {ahead} ahead of {size} micro-batches, {layout}"

    @property
    def continues(self) -> bool:
        """Whether the next window begins as in a run that did not stop: the versions that its
        forwards in flight have read were loaded, or are not needed."""
        return bool(self._older) or not self._stream.policy.follows or self._begins_empty

    def forgets(self, steps: int) -> bool:
        """Whether forwards in flight after so many steps are run again if these are saved."""
        return not self._stream.policy.follows and steps > self._synchronous

    @property
    def _begins_empty(self) -> bool:
        """Whether nothing is in flight, after the steps so far, in a run that did not stop."""
        return self._data.position.step <= self._synchronous

    def state(self) -> JsonValue:
        """The :attr:`key`."""
        return self.key

    def load(self, stored: str | None) -> None:
        """Note of which stream the older versions of a checkpoint are."""
        self._loaded = stored or ""

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Take over the older versions of a checkpoint, if it is of a stream like this one, so that
        the pipeline is filled with what its forwards in flight have read."""
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

    def train(self, step: int, rows: BatchReader, wishes: Asked, watch: Watch) -> list[StepResult]:
        """Run window `step`, counted from 0; returns the results that are known by now. A window
        that is recorded is told by :meth:`recorded`."""
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
        results = self._cut(wishes)
        return [*results, *self._flush()] if step < self._synchronous else results

    def recorded(self, window: int, records: Sequence[Record]) -> RecordedWindow | None:
        """A window that was recorded, with those beside it; None if the pipeline was filled anew
        since. `records` are of all ranks."""
        return self.recording.window(window, records)

    def _begin(self, step: int, rows: BatchReader) -> None:
        """Fill the pipeline: run the forwards that are in flight at the cut before a window."""
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
        """Those of all buckets of this process."""
        return [each for own in self._of_bucket.values() for each in own]

    def _fetch(self, rows: BatchReader) -> None:
        """Get the data of all windows that the part reaches into."""
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
        """The version of such weights; none is older than the oldest there is."""
        first = self._versions[self._stages[0]][0]
        return max(self._now + read.version, first.oldest)

    def _predict(self, shard: Shard, updates: Fraction, count: int, out: Tensor) -> None:
        """Write the weights so many `updates` after the `count` that were made, or before."""
        if updates < 0:
            predict_older_weights(shard, float(-updates), out)
            return
        optimizer = self._machine.optimizer
        rate = self._lr(shard.bucket.index, count - 1) if count else 0.0
        distance = float(updates) * rate
        predict(optimizer.rule, shard, distance, count, out)

    def ready(self, stage: int, windows_before: int, rank: int) -> bool:
        """Note that a pipeline rank is to update a stage; whether all ranks here that have it are
        through with the window."""
        window = self._now - windows_before
        through = self._through[stage, window]
        through.add(rank)
        here = set(self._machine.pipeline.ranks).intersection(
            self._machine.placement.holders(stage)
        )
        return self._late or through == here

    def update(self, stage: int, windows_before: int) -> None:
        """Update a stage by a window's gradients, unless a pause or another pipeline rank of this
        process has done so."""
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
        """Numbers of the buckets whose next version is made, or received, with that of a stage: the
        tied embedding's with the first stage, where that is here, else with the last."""
        yield stage
        if self._tied in self._of_bucket and stage == (0 if 0 in self._stages else self._tied - 1):
            yield self._tied

    def _lr(self, stage: int, window: int) -> float:
        """The learning rate of a stage, less in the first windows in which weights are stale."""
        lr, steps = self._update.lr(window), self._machine.config.pipeline.lr_anneal_steps
        number = window - self._synchronous
        if steps is None or not 0 <= number < steps:
            return lr
        return lr / max(1.0, float(self._behind[stage])) ** (1 - number / steps)

    def _norm_of_stage(self, stage: int) -> float:
        """The norm of a stage's gradients, which are complete, on all ranks that have it."""
        optimizer = self._machine.optimizer
        optimizer.reduce_stage(stage)
        self._squares[stage] = optimizer.finish_stage(stage)
        own = self._squares[stage : stage + 1].cpu()
        total = self._machine.mesh.ordered_sum(own, "tp", "cp", "dp", self._holders)
        return math.sqrt(total.item())

    def _norm_of_window(self, stage: int, window: int) -> float:
        """The norm by which a window's gradients of a stage are clipped, once all ranks are through
        with it; raises where not all is finite."""
        totals = self._totals_of(window)
        self._check(window, totals)
        if self._machine.config.optimizer.clip_scope == "stage":
            first = stage == 0  # which updates what is tied
            return math.sqrt(totals.squared_norms[stage] + first * totals.squared_norms[self._tied])
        return totals.norm

    def _cut(self, wishes: Asked) -> list[StepResult]:
        """End the window; returns results that are known."""
        machine, window = self._machine, self._windows[self._now]
        if self._late:
            for index in self._of_bucket:
                machine.optimizer.reduce_stage(index)
            for index in self._of_bucket:
                self._squares[index] = machine.optimizer.finish_stage(index)
            for each in self.versions():
                each.switch_accumulator()
        loss = local_loss(machine, window.counted, self._stream.microbatches)
        own = local_step_stats(machine, self._squares, *loss, wishes).pack()
        self._zero_squares()
        vector = machine.mesh.ordered_sum(own, "tp", "cp", "dp", largest=LARGEST)
        self._pending.append(
            (self._now, machine.mesh.start_ordered_sum(vector, "pp", largest=LARGEST))
        )
        for flow in self._flows:
            flow.cut()
        return self._results(self._now - self._delay)

    def _zero_squares(self) -> None:
        """Of each stage, and of the tied embedding."""
        stages, device = self._machine.placement.stages, self._machine.mesh.device
        self._squares = torch.zeros(stages + 1, dtype=torch.float64, device=device)

    def _results(self, until: int) -> list[StepResult]:
        """The results of all windows up to `until` that are not known yet."""
        found = []
        while self._pending and self._pending[0][0] <= until:
            window = self._pending[0][0]
            totals = self._totals_of(window)
            self._pending.popleft()
            self._check(window, totals)
            found.append(self._update.result(window, totals))
        return found

    def _totals_of(self, window: int) -> StepStats:
        """The totals of a window, once all ranks are through with it."""
        if window not in self._totals:
            self._totals.pop(window - self._delay - 2, None)
            wait = dict(self._pending)[window]
            self._totals[window] = self._step_totals.unpack(wait())
        return self._totals[window]

    def _check(self, window: int, totals: StepStats) -> None:
        """Raise, on all ranks, where the numbers of a window are not finite."""
        update = self._update
        if not math.isfinite(totals.states):
            raise update.states_not_finite()
        fault = update.judge.check(totals)
        if fault is not None:
            update.judge.act(window, fault)

    def use_schedule(self, schedule: Schedule) -> None:
        raise AssertionError("a stream has one schedule")

    def settle(self) -> list[StepResult]:
        """Make the updates that are pending and have all ranks at one cut; returns the results that
        were not known. Afterwards the newest weights are used, until the next window."""
        if self._first is None or self._paused:
            return []
        if self._late:
            for stage in self._stages:
                self.update(stage, 0)
        results = self._results(self._now)
        for flow, rank in zip(self._flows, self._machine.pipeline.ranks, strict=True):
            flow.pause(self._part[rank].under_way)
        for each in self.versions():
            each.use(self._now + 1)
        self._machine.optimizer.count = self._now + 1
        self._machine.optimizer.lr = self._update.lr(self._now)
        self._paused = True
        return results

    def _flush(self) -> list[StepResult]:
        """End a synchronous step: update all stages, and forget the versions before."""
        results = self.settle()
        for each in self.versions():
            each.begin(self._now + 1)
        self._first = None
        return results

    def saved(self) -> None:
        """Note that what the optimizer has is saved. Where the weights that forwards in flight have
        read are not, these are run again, as a run does that goes on from there."""
        if not self._stream.policy.follows:
            self.drop()

    def _go_on(self) -> None:
        for flow in self._flows:
            flow.resume()
        self._paused = False
