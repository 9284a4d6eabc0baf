"""The training step of a process, put together: what a trainer, or a user of the library, holds.

How a step is taken is in :mod:`megapipe.train.step`; begin with ``flushed.py`` there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megapipe.checkpoint.stateful import Stateful
from megapipe.checkpoint.storage import StorageLocation
from megapipe.checkpoint.writer import save
from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.recorder import Record
from megapipe.engine.stage import Stage
from megapipe.layout.layout import Layout
from megapipe.ops.kernels import Kernels
from megapipe.optim.scaler import LossScaler
from megapipe.schedule.generators import forward_only
from megapipe.schedule.ir import Schedule
from megapipe.train.async_training.streaming import AsyncTraining, holders_of
from megapipe.train.feed import BatchReader, Feed
from megapipe.train.resume.find import find, placed
from megapipe.train.resume.load import load
from megapipe.train.routing import make_routing
from megapipe.train.state import RunState, SaveArguments
from megapipe.train.step import logits
from megapipe.train.step.data import DataPosition, StepData
from megapipe.train.step.evaluation import Evaluator, ValidationResult
from megapipe.train.step.flushed import FlushedSteps
from megapipe.train.step.machine import Initial, build_machine, check_schedule
from megapipe.train.step.own_totals import StepTotals
from megapipe.train.step.post_validation import PostValidation, layers_here
from megapipe.train.step.stepper import Asked, Stepper, Watch
from megapipe.train.step.warm_up import WarmUp
from megapipe.train.totals import Wishes
from megapipe.train.update import StepResult, Update
from megapipe.util.left_out import SkippedSamples


class TrainStep:
    """The computation of one process; `schedule` replaces the configured one if given.

    `kernels` are those of :func:`~megapipe.train.kernels.agreed_kernels`, chosen here by default.
    `document_end` is the token that ends a document, needed where attention ends there.
    `sources` are those of a mixture, 0 if there is none.
    `initial` writes the initial weights, each time a region of a global tensor; by default they are
    drawn from ``run.seed``.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        *,
        schedule: Schedule | None = None,
        kernels: Kernels | None = None,
        document_end: int | None = None,
        sources: int = 0,
        initial: Initial | None = None,
    ) -> None:
        self.config, self.layout, self.mesh = config, layout, mesh
        self.machine = machine = build_machine(
            config, layout, mesh, schedule=schedule, kernels=kernels, initial=initial
        )
        self.kernels, self.pipeline = machine.kernels, machine.pipeline
        self.modules, self.stages = machine.modules, machine.stages
        self.placement, self.optimizer = machine.placement, machine.optimizer
        end = document_end if config.data.masks_documents else None
        holders = None if layout.async_schedule is None else holders_of(machine)
        self._feed = Feed(config, layout, mesh, machine.pipeline.ranks, end, sources, holders)
        self.scaler = LossScaler(config.optimizer, config.model.dtype)
        self.data = StepData(machine, self._feed, self.scaler)
        self.routing, self.maps = followers = make_routing(config, layout, machine)
        given = config.optimizer, machine.optimizer, self.scaler, followers
        exact = config.run.exact_on(mesh.device.type)
        self.update = Update(*given, config.train.steps, config.numbers, exact=exact)
        self.totals = StepTotals(machine, self.scaler, sources)
        self._evaluator = Evaluator(machine, self._feed, self.totals)
        self.streaming: AsyncTraining | None = None
        self.post_validation: PostValidation | None = None
        self.stepper: Stepper
        if layout.async_schedule is not None and holders is not None:
            self.stepper = self.streaming = AsyncTraining(
                machine, layout.async_schedule, self.data, self.totals, self.update, holders
            )
        elif config.optimizer.post_validation:
            layers = [] if self.routing.empty else layers_here(mesh, layout)
            self.stepper = self.post_validation = PostValidation(
                machine, self.data, self.totals, self.update, layers
            )
        else:
            self.stepper = FlushedSteps(machine, self.data, self.totals, self.update)
        members: list[Stateful] = [*followers, self.scaler, self.update.judge]
        if self.streaming is not None:
            members.append(self.streaming)
        self.state = RunState(machine, self.data, members, self._forget)
        """All that checkpoints keep; callbacks that have a state are added to it."""
        self._warm: Schedule | None = None
        """The schedule whose operations have run on this device."""
        self.when_warm: Callable[[], None] = lambda: None
        """Called before the first step of each schedule, when its operations have run."""
        self.settled = True
        """Whether all steps so far are validated, and their weights gathered."""
        self._seconds: dict[int, float] = {}
        """Seconds of the steps, counted from 0, whose results are not known yet."""

    @property
    def schedule(self) -> Schedule:
        """The schedule in force."""
        return self.data.schedule

    @property
    def position(self) -> DataPosition:
        """How far the data are consumed."""
        return self.data.position

    @position.setter
    def position(self, position: DataPosition) -> None:
        self.data.position = position

    @property
    def left_out(self) -> SkippedSamples:
        """Numbers of samples that no step takes."""
        return self.data.left_out

    @left_out.setter
    def left_out(self, left_out: SkippedSamples) -> None:
        self.data.left_out = left_out

    @property
    def last(self) -> Stage | None:
        """The last stage, where this process has it."""
        return self.machine.last

    def samples(self, step: int) -> int:
        """Samples that the steps before `step` take; :attr:`left_out` has the numbers of others."""
        return self.data.samples(step)

    @property
    def samples_read(self) -> list[int]:
        """Numbers of the samples of the last step, as far as first stages here were given them."""
        return self.stepper.samples_read

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule, on the same placement, from the next step on."""
        assert schedule.placement == self.placement
        assert schedule.recompute == self.schedule.recompute
        check_schedule(schedule, self.layout)
        self.stepper.use_schedule(schedule)
        self.data.schedule = schedule

    def _use_schedule_of(self, step: int) -> list[StepResult]:
        """Take up the schedule of a step, if it is another; the results that this settles."""
        schedule = self.data.schedule_of(step)
        if schedule is self.schedule:
            return []
        results = self._settle()
        self.use(schedule)
        return results

    def train(
        self,
        step: int,
        rows: BatchReader,
        *,
        record: bool = False,
        name: bool = False,
        settle: bool = False,
        wishes: Asked = Wishes,
    ) -> list[StepResult]:
        """Take optimizer step `step`, counted from 0; returns the results that are known by now and
        were not before, oldest first.

        As a rule that is the result of this step. With ``optimizer.post_validation`` it is that of
        the step before, if there is one, in a pipeline without a flush (``pipeline.weights``) that
        of some steps before, and that of this step only if it is settled (:meth:`settle`): with
        `settle`, or when a rank wishes to stop or to save. `wishes` is called once, after the
        backward passes, for what this rank wants. With `record`, :meth:`records` tells afterwards
        when each op ran; with `name` profilers see names of actions. Raises
        :class:`~megapipe.train.judge.BadStep` where a loss or a gradient is not finite and
        ``numbers.non_finite`` is not skip: before the update, or with it undone.
        """
        start = time.perf_counter()
        results = self._use_schedule_of(step)
        if self._warm is not self.schedule:
            self._warm_up(step, rows)
            self.when_warm()
        results += self.stepper.train(step, rows, wishes, Watch(record, name))
        self.settled = False
        if settle or any(r.wishes.stop or r.wishes.save for r in results):
            results += self._settle()
        self._seconds[step] = time.perf_counter() - start
        return self._timed(results)

    def _warm_up(self, step: int, rows: BatchReader) -> None:
        """Before the first step of a schedule: on GPUs that exchange messages, run its operations
        and those of validation (:mod:`megapipe.train.step.warm_up`)."""
        self._warm = self.schedule
        sends = len(self.pipeline.ranks) < self.placement.ranks
        warmed = (self.schedule, forward_only(self.placement, 1))
        for schedule in warmed if self.mesh.device.type == "cuda" and sends else ():
            WarmUp(self.machine, schedule).run(self.data.fetch_for(schedule, step, rows))

    def settle(self) -> list[StepResult]:
        """Wait for the weights of the last step; if it is open, validate it and return its result.

        To be called before weights are used for anything but the next step.
        """
        start = time.perf_counter()
        results = self._settle()
        for result in results:
            self._seconds[result.step] += time.perf_counter() - start
        return self._timed(results)

    def _require_settled(self, what: str) -> None:
        if not self.settled:
            raise RuntimeError(f"{what}: the last step is not settled: expected settle() before it")

    def _settle(self) -> list[StepResult]:
        results = self.stepper.settle()
        self.optimizer.await_all_weights()
        self.update.check_states()
        self.settled = True
        return results

    def _timed(self, results: Sequence[StepResult]) -> list[StepResult]:
        """The results with the seconds of their steps."""
        return [replace(result, seconds=self._seconds.pop(result.step)) for result in results]

    def save(
        self,
        folder: Path | str,
        step: int,
        *,
        run_id: str | None = None,
        digests: Mapping[str, str] | None = None,
        order: str = "",
    ) -> StorageLocation:
        """Write a checkpoint of the state after `step` steps, into a folder that all ranks share.

        Returns the checkpoint's own folder in it, ``step-<step>``, on every rank. All call it, once
        the steps are settled (:meth:`settle`). `run_id`, the `digests` of the data and their
        `order` are stored for runs that resume from it. Raises :class:`CheckpointError` on all.
        """
        content = self.content(step, run_id=run_id, digests=digests, order=order)
        place = placed(folder, self.config, self.mesh)
        return save(place, group=self.mesh, **content._asdict())

    def content(
        self,
        step: int,
        *,
        run_id: str | None = None,
        digests: Mapping[str, str] | None = None,
        order: str = "",
    ) -> SaveArguments:
        """The content of a checkpoint; its pieces are views of the state."""
        self._require_settled("save")
        run_id = run_id or self.mesh.share(uuid.uuid4().hex)
        return self.state.content(step, run_id=run_id, digests=digests or {}, order=order)

    def load(self, path: Path | str) -> None:
        """Take over the state of a checkpoint of any layout; :attr:`position` then has its step.

        `path` is its folder, or a folder of checkpoints, for the newest. All call it. Raises
        :class:`CheckpointError` on all if it is damaged, or of another model."""
        load(find(path, self.config, self.mesh), self.state, self.mesh)

    def _forget(self) -> None:
        """Drop what is under way, as another state is to be taken over."""
        self.optimizer.await_all_weights()
        self.stepper.drop()
        self._seconds.clear()
        self.settled = True

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, V] of `tokens` [b, s], in fp32 (fp64 for fp64), of the weights after the
        last settled step.

        To be called by all ranks with the same tokens; each gets all logits. Raises
        :class:`DataError` for sequences longer than ``train.sequence_length`` or ids beyond the
        vocabulary.
        """
        self._require_settled("logits")
        logits.check(self.machine, tokens)
        return logits.compute_logits(self.machine, tokens, self._feed.document_end)

    def records(self) -> list[Record]:
        """The last recorded step of all pipeline ranks, on processes of the first; else empty."""
        return self.pipeline.records()

    def evaluate(
        self, rows: BatchReader, samples: int, *, stop: Callable[[], bool] = lambda: False
    ) -> ValidationResult:
        """Mean loss per unmasked token over samples 0 .. `samples` - 1.

        The last batch is filled up with rows that are masked here, whatever they hold. `stop` tells
        after each batch whether this rank was asked to stop; if one was, all give up.
        """
        return self._evaluator.evaluate(rows, samples, stop)
