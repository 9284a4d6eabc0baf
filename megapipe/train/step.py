"""One training step. Read this first.

:class:`TrainStep` owns what a process computes with: its stages, the executors that run their
programs, and the optimizer. A step is::

    fetch micro-batches -> count unmasked tokens over dp -> run the pipeline program, which
    sends off each stage's gradients when they are complete -> add up norms and losses over
    all ranks, once -> clip, update -> begin to gather the new weights

Gradient accumulation is the pipeline's micro-batches, so a single stage takes the same path. The
loss is the sum of token losses over the global batch by the number of unmasked tokens in it; each
micro-batch back-propagates its sum by that global count, so gradients only ever need adding.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megapipe.assembly.sharding import make_sharding
from megapipe.assembly.stage import make_stage
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import Place
from megapipe.checkpoint.writer import save
from megapipe.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.executor import Executor
from megapipe.engine.pipeline import Pipeline
from megapipe.engine.recorder import Record
from megapipe.engine.stage import Key, Stage
from megapipe.errors import ScheduleError
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES, LocalParameter, release_initial
from megapipe.layout.layout import Layout
from megapipe.left_out import LeftOut
from megapipe.ops.kernels import Kernels
from megapipe.optim.buffers import main_dtype
from megapipe.optim.policy import ZeroPolicy
from megapipe.optim.scaler import LossScaler
from megapipe.schedule.generators import forward_only
from megapipe.schedule.ir import Schedule
from megapipe.train import checkpoint_io, evaluation, logits, resume
from megapipe.train.coordinates import Coordinates
from megapipe.train.evaluation import Evaluation
from megapipe.train.expert_maps import ExpertMaps
from megapipe.train.feed import Counted, Feed, Rows
from megapipe.train.kernels import agreed_kernels
from megapipe.train.make_optimizer import make_optimizer
from megapipe.train.messages import Messages, receive_ahead
from megapipe.train.own_totals import own_loss, own_totals
from megapipe.train.post_validation import PostValidation, layers_here
from megapipe.train.routing_state import RoutingState
from megapipe.train.streaming import Streaming, holders_of
from megapipe.train.totals import LARGEST, Totals, Wishes
from megapipe.train.update import StepResult, Update
from megapipe.train.warm_up import WarmUp
from megapipe.watch.journal import text


class Position(NamedTuple):
    """How far the data are consumed; every further step takes a global batch."""

    step: int
    """Steps done."""
    samples: int
    """Samples that they took."""


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
        initial: Callable[[LocalParameter, Tensor], None] | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self._batches = config.train.batches
        self.schedule = schedule or layout.schedule
        self.placement = self.schedule.placement
        self._check_schedule()
        self.kernels = kernels or agreed_kernels(config, layout, mesh, self.schedule)
        self.policy = ZeroPolicy.of(config.optimizer, layout.most_copies)
        self._messages = Messages(layout, config.train)
        self.pipeline = Pipeline(
            mesh,
            self.placement,
            layout.replicas,
            shape_of=self._messages.of_schedule,
            dtype=TORCH_DTYPES[config.model.dtype],
            in_process=layout.in_process,
            scatter=layout.scatters,
            packed=layout.sends_tuples,
            debug=config.pipeline.debug,
            receive_ahead=receive_ahead(config, layout, mesh.device),
            ctas=config.pipeline.channel_ctas,
        )
        self.modules = {
            s: layout.model.build(layout.stage_layers[s], make_sharding(config, mesh, self.kernels))
            for rank in self.pipeline.ranks
            for s in self.placement.stages_of(rank)
        }
        self.optimizer = make_optimizer(self)
        self.stages: dict[int, Stage] = {
            s: make_stage(layout, module, layout.spans[s], recompute=s in self.schedule.recompute)
            for s, module in self.modules.items()
        }
        for stage in self.stages.values():
            stage.module.to(mesh.device)  # buffers; parameters are there
            stage.own_autograd_parameters()
        if not config.data.masks_documents:
            document_end = None
        self._sources = sources
        holders = holders_of(self) if layout.stream is not None else None
        self._feed = Feed(config, layout, mesh, self.pipeline.ranks, document_end, sources, holders)
        self.scaler = LossScaler(config.optimizer, config.model.dtype)
        self.routing = RoutingState(
            layout.model.experts(),
            self.modules.values(),
            bias_rate=config.model.moe.bias_rate,
            counts=config.model.moe.balance_scope == "step",
            first_only=config.model.moe.balance_choices == "first",
            dtype=main_dtype(TORCH_DTYPES[config.model.dtype]),
        )
        self.maps = ExpertMaps.of(config, layout, self.modules.values(), self.optimizer)
        moved = self.optimizer, self.scaler, self.routing, self.maps
        exact = config.run.exact_on(mesh.device.type)
        self.update = Update(
            config.optimizer, *moved, config.train.steps, config.numbers, exact=exact
        )
        self.streaming: Streaming | None = None
        if layout.stream is not None and holders is not None:
            shape = self._messages.of_schedule(self.schedule)
            self.streaming = Streaming(self, layout.stream, self._feed, shape, sources, holders)
        self._executors = [] if self.streaming else self._make_executors(self.schedule, train=True)
        self._validators: dict[int, tuple[Schedule, list[Executor]]] = {}
        self._warm: Schedule | None = None
        """The schedule whose operations have run on this device."""
        self.when_warm: Callable[[], None] = lambda: None
        """Called before the first step of each schedule, when its operations have run."""
        self._watched: dict[tuple[bool, bool], list[Executor]] = {}
        """Executors that (record, name)."""
        self.position = Position(0, 0)
        self.left_out = LeftOut.of(config.numbers.skip_samples)
        """Numbers of samples that no step takes."""
        self.settled = True
        """Whether all steps so far are validated, and their weights gathered."""
        self._seconds: dict[int, float] = {}
        """Seconds of the steps, counted from 0, whose results are not known yet."""
        self.last = self.stages.get(self.placement.stages - 1)
        seed = config.run.seed
        self.optimizer.set_weights(initial or (lambda spec, out: spec.initialise(out, seed)))
        for module in self.modules.values():
            release_initial(module.parameters())
        self.post_validation: PostValidation | None = None
        if config.optimizer.post_validation:
            layers = [] if self.routing.empty else layers_here(mesh, layout)
            given = self.fetch, self._upload_ahead, self.own_totals, self._unpack
            self.post_validation = PostValidation(self.update, mesh, *given, layers)

    def _check_schedule(self) -> None:
        """Refuse a schedule of another number of ranks, stages or micro-batches."""
        layout, placement = self.layout, self.placement
        whole = self.schedule.whole_microbatches
        sizes = (placement.ranks, placement.stages) == (layout.pp, layout.stages)
        counts = [layout.microbatches, *(s.whole_microbatches for s in layout.smaller.values())]
        if not sizes or whole not in counts:
            raise ScheduleError(
                f"schedule {self.schedule.name} has {placement.ranks} ranks, {placement.stages} "
                f"stages and {whole} micro-batches; the layout needs {layout.pp}, "
                f"{layout.stages} and {layout.microbatches}"
            )

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule, on the same placement, from the next step on."""
        assert schedule.placement == self.placement
        assert schedule.recompute == self.schedule.recompute
        assert self.post_validation is None or not self.post_validation.open
        self.schedule = schedule
        self._check_schedule()
        self._executors = self._make_executors(schedule, train=True)
        self._watched.clear()

    def _schedule_of(self, step: int) -> Schedule:
        """The schedule for the batch of a step, which grows under ``train.batch_ramp``."""
        smaller, batch = self.layout.smaller, self._batches.batch_at(self.samples(step))
        if batch in smaller:
            return smaller[batch]
        return self.layout.schedule if self.schedule in smaller.values() else self.schedule

    def _use_schedule_of(self, step: int) -> list[StepResult]:
        """Take up the schedule of a step, if it is another; the results that this settles."""
        schedule = self._schedule_of(step)
        if schedule is self.schedule:
            return []
        results = self._settle()
        self.use(schedule)
        return results

    def _make_executors(
        self, schedule: Schedule, *, train: bool, record: bool = False, name: bool = False
    ) -> list[Executor]:
        return self.pipeline.executors(
            schedule,
            self.stages,
            self.optimizer,
            train=train,
            proved=schedule is self.layout.schedule or schedule in self.layout.smaller.values(),
            record=record,
            name=name,
            speculate=train and self.config.optimizer.post_validation,
        )

    def train(
        self,
        step: int,
        rows: Rows,
        *,
        record: bool = False,
        name: bool = False,
        settle: bool = False,
        wishes: Callable[[], Wishes] = Wishes,
    ) -> list[StepResult]:
        """Take optimizer step `step`, counted from 0; returns the results that are known by now and
        were not before, oldest first.

        As a rule that is the result of this step. With ``optimizer.post_validation`` it is that of
        the step before, if there is one, in a pipeline without a flush (``pipeline.weights``) that
        of some steps before, and that of this step only if it is settled (:meth:`settle`): with
        `settle`, or when a rank wishes to stop or to save. `wishes` is called once, after the
        backward passes, for what this rank wants. With `record`, :meth:`records` tells afterwards
        when each op ran; with `name` profilers see names of actions. Raises
        :class:`~megapipe.train.judge.Unsound` where a loss or a gradient is not finite and
        ``numbers.non_finite`` is not skip: before the update, or with it undone.
        """
        start = time.perf_counter()
        results = self._use_schedule_of(step)
        results += self._train(step, rows, record=record, name=name, wishes=wishes)
        self.settled = False
        if settle or any(r.wishes.stop or r.wishes.save for r in results):
            results += self._settle()
        self._seconds[step] = time.perf_counter() - start
        return self._timed(results)

    def _train(
        self, step: int, rows: Rows, *, record: bool, name: bool, wishes: Callable[[], Wishes]
    ) -> list[StepResult]:
        """The step; the results that are known now."""
        if self._warm is not self.schedule:
            self._warm_up(step, rows)
            self.when_warm()
        if self.streaming is not None:
            return self.streaming.train(step, rows, wishes, record=record, name=name)
        executors = self._executors
        if record or name:
            if (record, name) not in self._watched:
                self._watched[record, name] = self._make_executors(
                    self.schedule, train=True, record=record, name=name
                )
            executors = self._watched[record, name]
            self.mesh.barrier()
        if self.post_validation is not None:
            before = self.post_validation.train(executors[0], step, rows, wishes)
            return [] if before is None else [before]
        again = partial(self._compute, self._executors, step, rows, Wishes)
        return [self.update.apply(step, self._compute(executors, step, rows, wishes), again)]

    def _compute(
        self, executors: list[Executor], step: int, rows: Rows, wishes: Callable[[], Wishes]
    ) -> Totals:
        """Reduced gradients of a step; its totals of all ranks."""
        self.mesh.journal.does(text("reading samples"))
        microbatches, counted = self.fetch(step, rows)
        self.optimizer.zero_grad()
        self.pipeline.run(executors, microbatches)
        self._upload_ahead(step + 1, rows)
        own = self.own_totals(counted, wishes).pack()
        whole = self.mesh.ordered_sum(own, "tp", "cp", "dp", "pp", largest=LARGEST)
        return self._unpack(whole)

    def _unpack(self, vector: Tensor) -> Totals:
        """The totals that a vector of this run packs."""
        return Totals.unpack(vector, self._sources, sum(self.layout.model.told().values()))

    def _warm_up(self, step: int, rows: Rows) -> None:
        """Before the first step of a schedule: on GPUs that exchange messages, run its operations
        and those of validation (:mod:`megapipe.train.warm_up`)."""
        self._warm = self.schedule
        sends = len(self.pipeline.ranks) < self.placement.ranks
        warmed = (self.schedule, forward_only(self.placement, 1))
        for schedule in warmed if self.mesh.device.type == "cuda" and sends else ():
            first = self.samples(step)
            microbatches, _ = self._feed.fetch(schedule, rows, step, first, 1.0, self.left_out)
            WarmUp(self, schedule, self._messages.of_schedule(schedule)).run(microbatches)

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
        results = [] if self.streaming is None else self.streaming.pause()
        if self.post_validation is not None:
            result = self.post_validation.settle()
            results += [] if result is None else [result]
        self.optimizer.await_all_weights()
        self.update.check_states()
        self.settled = True
        return results

    def _timed(self, results: Sequence[StepResult]) -> list[StepResult]:
        """The results with the seconds of their steps."""
        return [replace(result, seconds=self._seconds.pop(result.step)) for result in results]

    def fetch(self, step: int, rows: Rows) -> tuple[dict[Key, MicroBatch], Counted]:
        """Micro-batches of a step, and the unmasked tokens of the last stages here; begins to read
        those of the next step, if there will be one."""
        first, scale = self.samples(step), self.scaler.scale
        found = self._feed.fetch(self.schedule, rows, step, first, scale, self.left_out)
        if step + 1 < self.config.train.last_step:
            self._feed.read_ahead(*self._coming(step + 1, rows))
        return found

    def _coming(self, step: int, rows: Rows) -> tuple[Schedule, Rows, int, LeftOut]:
        """The schedule of a step and its place in the data."""
        return self._schedule_of(step), rows, self.samples(step), self.left_out

    def _upload_ahead(self, step: int, rows: Rows) -> None:
        """While a GPU computes the step before, get the data of `step`, if there will be one."""
        if step < self.config.train.last_step:
            self._feed.upload_ahead(*self._coming(step, rows))

    @property
    def samples_read(self) -> list[int]:
        """Numbers of the samples of the last step, as far as first stages here were given them."""
        return self._feed.samples_read if self.streaming is None else self.streaming.samples_read

    def samples(self, step: int) -> int:
        """Samples that the steps before `step` take; :attr:`left_out` has the numbers of others."""
        position = self.position
        return self._batches.after(position.samples, step - position.step)

    def own_totals(self, counted: Counted, wishes: Callable[[], Wishes]) -> Totals:
        """This rank's part of the totals of a step whose backward passes are done."""
        squares = self.optimizer.finish_reduce(self.scaler.scale)
        return own_totals(self, squares, *self.own_loss(counted), wishes)

    def save(
        self,
        folder: Path | str,
        step: int,
        *,
        run_id: str | None = None,
        digests: Mapping[str, str] | None = None,
        order: str = "",
    ) -> Place:
        """Write a checkpoint of the state after `step` steps, into a folder that all ranks share.

        Returns the checkpoint's own folder in it, ``step-<step>``, on every rank. All call it, once
        the steps are settled (:meth:`settle`). `run_id`, the `digests` of the data and their
        `order` are stored for runs that resume from it. Raises :class:`CheckpointError` on all.
        """
        content = self.content(step, run_id=run_id, digests=digests, order=order)
        place = resume.placed(folder, self.config, self.mesh)
        return save(place, group=self.mesh, **content._asdict())

    def content(
        self,
        step: int,
        *,
        run_id: str | None = None,
        digests: Mapping[str, str] | None = None,
        order: str = "",
    ) -> checkpoint_io.Content:
        """The content of a checkpoint; its pieces are views of the state."""
        self._require_settled("save")
        stream = None if self.streaming is None else self.streaming.key
        found = checkpoint_io.content(
            self.config,
            self.layout,
            self.optimizer,
            step=step,
            run_id=run_id or self.mesh.share(uuid.uuid4().hex),
            samples=self.samples(step),
            left_out=self.left_out,
            order=order,
            loss_scale=self.scaler.state(),
            judged=self.update.judge.state(),
            digests=digests or {},
            beside=chain(self.routing.pieces(), self.maps.pieces()) if self.mesh.rank == 0 else (),
            owners=self.maps.owners,
            stream=stream,
        )
        if self.streaming is not None:
            self.streaming.saved()
        return found

    def load(self, path: Path | str) -> None:
        """Take over the state of a checkpoint of any layout; :attr:`position` then has its step.

        `path` is its folder, or a folder of checkpoints, for the newest. All call it. Raises
        :class:`CheckpointError` on all if it is damaged, or of another model."""
        resume.load(resume.find(path, self.config, self.mesh), self.config, self, self.mesh)

    def take_over(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint's weights, states and coordinates, in the place of all that is."""
        self.optimizer.await_all_weights()
        if self.post_validation is not None:
            self.post_validation.drop()
        if self.streaming is not None:
            self.streaming.drop()
        self._seconds.clear()
        self.settled = True
        found = Coordinates.of(checkpoint)
        self.position = Position(checkpoint.step, found.samples)
        self.left_out = found.left_out_with(self.left_out)
        self.maps.take_owners(found.owners)
        checkpoint_io.load(self.optimizer, checkpoint, found.updates, found.lr)
        self.routing.load(checkpoint, checkpoint.names())
        self.maps.load(checkpoint, checkpoint.names())
        if self.streaming is not None:
            self.streaming.load_older(checkpoint, found.stream)
        self.scaler.load(found.loss_scale or self.scaler.state())
        self.update.judge.load(found.judged)

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, V] of `tokens` [b, s], in fp32 (fp64 for fp64), of the weights after the
        last settled step.

        To be called by all ranks with the same tokens; each gets all logits. Raises
        :class:`DataError` for sequences longer than ``train.sequence_length`` or ids beyond the
        vocabulary.
        """
        self._require_settled("logits")
        logits.check(self, tokens)
        return logits.read(self, tokens, self._messages.of_size, self._feed.document_end)

    def records(self) -> list[Record]:
        """The last recorded step of all pipeline ranks, on processes of the first; else empty."""
        return self.pipeline.records()

    def evaluate(
        self, rows: Rows, samples: int, *, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation:
        """Mean loss per unmasked token over samples 0 .. `samples` - 1.

        The last batch is filled up with rows that are masked here, whatever they hold. `stop` tells
        after each batch whether this rank was asked to stop; if one was, all give up.
        """
        return evaluation.evaluate(self, rows, samples, stop)

    def run_forward(self, rows: Rows, first: int, microbatches: int) -> tuple[float, int]:
        """Sum of the unmasked token losses, and these tokens, of the samples from `first` on that
        the last stages of this process see in so many micro-batches."""
        if microbatches not in self._validators:
            schedule = forward_only(self.placement, microbatches)
            self._validators[microbatches] = schedule, self._make_executors(schedule, train=False)
        schedule, executors = self._validators[microbatches]
        given, counted = self._feed.fetch(schedule, rows, 0, first)
        self.pipeline.run(executors, given)
        loss, counted = self.own_loss(counted)
        return loss.item(), counted.tokens

    def own_loss(self, counted: Counted) -> tuple[Tensor, Counted]:
        """Sum of this rank's unmasked token losses, and its tokens."""
        return own_loss(self, counted)
