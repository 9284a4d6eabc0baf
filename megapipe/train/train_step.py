"""The training step of a process: the object that a trainer or a library user holds.

:mod:`megapipe.train.step` implements the parts; begin with ``step/flushed.py``.
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
from megapipe.optim.loss_scaler import LossScaler
from megapipe.schedule.generators import forward_only
from megapipe.schedule.ir import Schedule
from megapipe.train.async_training.async_training import AsyncTraining, holders_of
from megapipe.train.feed import BatchReader, Feed
from megapipe.train.make_followers import make_routing
from megapipe.train.resume.find import find, placed
from megapipe.train.resume.load import load
from megapipe.train.state import RunState, SaveArguments
from megapipe.train.step import logits
from megapipe.train.step.data import DataPosition, StepData
from megapipe.train.step.evaluation import Evaluator, ValidationResult
from megapipe.train.step.flushed import FlushedSteps
from megapipe.train.step.local_stats import StepTotals
from megapipe.train.step.machine import Initial, build_machine, check_schedule
from megapipe.train.step.post_validation import PostValidation, layers_here
from megapipe.train.step.stepper import Asked, Stepper, Watch
from megapipe.train.step.warm_up import WarmUp
from megapipe.train.step_stats import RankRequests
from megapipe.train.update import StepResult, Update
from megapipe.util.skipped_samples import SkippedSamples


class TrainStep:
    """Training step of one process. `schedule`, if given, replaces the configured one.

    `kernels` are by default those of :func:`~megapipe.train.kernel_selection.agreed_kernels`.
    `document_end` is the id of the EOS token, needed if attention ends at documents. `sources` is
    the number of sources of a mixture, 0 without a mixture. `initial` writes the initial weights,
    region by region of the global tensors; by default they are drawn from ``run.seed``.
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
        arguments = config.optimizer, machine.optimizer, self.scaler, followers
        exact = config.run.exact_on(mesh.device.type)
        self.update = Update(*arguments, config.train.steps, config.health, exact=exact)
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
        """State saved in checkpoints; callbacks that have a state are added to it."""
        self._warm: Schedule | None = None
        """Schedule whose operations have already run on this device."""
        self.when_warm: Callable[[], None] = lambda: None
        """Function called before the first step of each schedule, once its operations have run."""
        self.settled = True
        """Whether all steps so far are validated, and their weights gathered."""
        self._seconds: dict[int, float] = {}
        """Seconds of the steps whose results are not known yet, by step (counted from 0)."""

    @property
    def schedule(self) -> Schedule:
        """The current schedule."""
        return self.data.schedule

    @property
    def position(self) -> DataPosition:
        """Steps done and samples consumed."""
        return self.data.position

    @position.setter
    def position(self, position: DataPosition) -> None:
        self.data.position = position

    @property
    def skipped_samples(self) -> SkippedSamples:
        """Samples that no step takes."""
        return self.data.skipped_samples

    @skipped_samples.setter
    def skipped_samples(self, skipped_samples: SkippedSamples) -> None:
        self.data.skipped_samples = skipped_samples

    @property
    def last(self) -> Stage | None:
        """Last stage of the pipeline, if this process has it."""
        return self.machine.last

    def samples(self, step: int) -> int:
        """Return the number of samples of all steps before `step`, skipped samples left out."""
        return self.data.samples(step)

    @property
    def samples_read(self) -> list[int]:
        """Global indices of the last step's samples on local first stages."""
        return self.stepper.samples_read

    def use(self, schedule: Schedule) -> None:
        """Switch to another schedule, on the same placement, from the next step on."""
        assert schedule.placement == self.placement
        assert schedule.recompute == self.schedule.recompute
        check_schedule(schedule, self.layout)
        self.stepper.use_schedule(schedule)
        self.data.schedule = schedule

    def _use_schedule_of(self, step: int) -> list[StepResult]:
        """Switch to the schedule of `step` if it differs; return step results that become known."""
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
        requests: Asked = RankRequests,
    ) -> list[StepResult]:
        """Take optimizer step `step`, counted from 0; return the newly known results, oldest first.

        Usually they are the result of this step. With ``optimizer.post_validation`` it is the
        result of the previous step, if there is one. In a no-flush pipeline
        (``pipeline.weight_versions``) it is the result of an earlier step. In both cases the result
        of this step is only included if the step is settled (:meth:`settle`): with `settle`, or if
        a rank requests to stop or to save.

        `requests` is called once, after the backward passes, for this rank's requests. With
        `record`, :meth:`records` returns afterwards when each operation ran; with `name` profilers
        see the names of actions. Raises :class:`~megapipe.train.anomaly_detection.BadStep` if a
        loss or a gradient is not finite and ``health.non_finite`` is not skip: before the update,
        or with the update undone.
        """
        start = time.perf_counter()
        results = self._use_schedule_of(step)
        if self._warm is not self.schedule:
            self._warm_up(step, rows)
            self.when_warm()
        results += self.stepper.train(step, rows, requests, Watch(record, name))
        self.settled = False
        if settle or any(r.requests.stop or r.requests.save for r in results):
            results += self._settle()
        self._seconds[step] = time.perf_counter() - start
        return self._timed(results)

    def _warm_up(self, step: int, rows: BatchReader) -> None:
        """Before a schedule's first step, warm up its operations and those of validation
        (:mod:`megapipe.train.step.warm_up`). Only GPUs that send pipeline messages need this."""
        self._warm = self.schedule
        sends = len(self.pipeline.ranks) < self.placement.ranks
        warmed = (self.schedule, forward_only(self.placement, 1))
        for schedule in warmed if self.mesh.device.type == "cuda" and sends else ():
            WarmUp(self.machine, schedule).run(self.data.fetch_for(schedule, step, rows))

    def settle(self) -> list[StepResult]:
        """Wait for the weights of the last step; if the step is not validated yet, validate it and
        return its result.

        Call this before weights are used for anything except the next step.
        """
        start = time.perf_counter()
        results = self._settle()
        for result in results:
            self._seconds[result.step] += time.perf_counter() - start
        return self._timed(results)

    def _require_settled(self, what: str) -> None:
        if not self.settled:
            raise RuntimeError(f"{what}: the last step is not settled: call settle() before it")

    def _settle(self) -> list[StepResult]:
        results = self.stepper.settle()
        self.optimizer.await_all_weights()
        self.update.check_states()
        self.settled = True
        return results

    def _timed(self, results: Sequence[StepResult]) -> list[StepResult]:
        """Return the results with the seconds of their steps."""
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

        Returns the checkpoint's location, ``step-<step>`` in that folder, on every rank.
        Collective; call it once the steps are settled (:meth:`settle`). `run_id`, the `digests` of
        the data and their `order` are stored for runs that resume. Raises :class:`CheckpointError`
        on all ranks.
        """
        content = self.content(step, run_id=run_id, digests=digests, order=order)
        root = placed(folder, self.config, self.mesh)
        return save(root, group=self.mesh, **content._asdict())

    def content(
        self,
        step: int,
        *,
        run_id: str | None = None,
        digests: Mapping[str, str] | None = None,
        order: str = "",
    ) -> SaveArguments:
        """Return the content of a checkpoint; the pieces are views of the state."""
        self._require_settled("save")
        run_id = run_id or self.mesh.share(uuid.uuid4().hex)
        return self.state.content(step, run_id=run_id, digests=digests or {}, order=order)

    def load(self, path: Path | str) -> None:
        """Load the state of a checkpoint of any layout; :attr:`position` then has its step. `path`
        is a checkpoint, or a folder from which the newest checkpoint is loaded. Collective. Raises
        :class:`CheckpointError` on all ranks for a damaged checkpoint, or one of another model."""
        load(find(path, self.config, self.mesh), self.state, self.mesh)

    def _forget(self) -> None:
        """Drop work in flight, before another state is loaded."""
        self.optimizer.await_all_weights()
        self.stepper.drop()
        self._seconds.clear()
        self.settled = True

    def logits(self, tokens: Tensor) -> Tensor:
        """Compute logits [b, s, V] of `tokens` [b, s], in fp32 (fp64 for fp64), with settled
        weights.

        Collective: all ranks pass the same tokens, and each receives all logits. Raises
        :class:`DataError` for sequences longer than ``train.sequence_length`` or ids beyond the
        vocabulary.
        """
        self._require_settled("logits")
        logits.check(self.machine, tokens)
        return logits.compute_logits(self.machine, tokens, self._feed.document_end)

    def records(self) -> list[Record]:
        """Return all pipeline ranks' records of the last recorded step, on processes of the first
        pipeline rank; [] elsewhere."""
        return self.pipeline.records()

    def evaluate(
        self, rows: BatchReader, samples: int, *, stop: Callable[[], bool] = lambda: False
    ) -> ValidationResult:
        """Return the mean loss per unmasked token over samples 0 .. `samples` - 1.

        The last batch is padded with masked samples. After each batch `stop` says whether this rank
        was asked to stop; if any rank was, all ranks stop evaluating.
        """
        return self._evaluator.evaluate(rows, samples, stop)
