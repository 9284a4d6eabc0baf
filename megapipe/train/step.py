"""One training step. Read this first.

:class:`TrainStep` owns what a process computes with: its stages, the executors that run their
programs, and the optimizer. A step is::

    fetch micro-batches -> count unmasked tokens over dp -> run the pipeline program
    -> reduce gradients, norm -> clip, update, gather weights -> loss to every rank

Gradient accumulation is the pipeline's micro-batches, so a single stage takes the same path. The
loss is the sum of token losses over the global batch by the number of unmasked tokens in it; each
micro-batch back-propagates its sum by that global count, so gradients only ever need adding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config import Config
from megapipe.engine.channels import (
    Channels,
    InProcessChannels,
    MessageShape,
    ProcessGroupChannels,
)
from megapipe.engine.executor import Executor, run_together
from megapipe.engine.recorder import Record, Recorder
from megapipe.engine.stage import Key, Stage
from megapipe.errors import NumericError, ScheduleError
from megapipe.layout import Layout
from megapipe.mesh import ParallelMesh
from megapipe.model.gpt import TORCH_DTYPES, GPTStage
from megapipe.model.microbatch import MicroBatch
from megapipe.optim.buffers import make_buckets
from megapipe.optim.lr import learning_rate
from megapipe.optim.zero import Optimizer, total_norm
from megapipe.schedule.generators import forward_only
from megapipe.schedule.ir import Schedule
from megapipe.schedule.lower import lower, pairs
from megapipe.tensor_parallel.parameter import Sharding
from megapipe.train.feed import Feed, Rows

VALIDATION_MICROBATCHES = 64
"""Most micro-batches of one validation program."""


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank."""

    loss: float
    """Mean loss per unmasked token of the global batch, nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    """Unmasked tokens in the global batch."""


class TrainStep:
    """The computation of one process; `schedule` replaces the configured one if given."""

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        *,
        schedule: Schedule | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self.schedule = schedule or layout.schedule
        self.placement = self.schedule.placement
        self.in_process = config.pipeline.channels == "in_process"
        self.pipeline_ranks = range(layout.pp) if self.in_process else [mesh.pp.index]
        self.dtype = TORCH_DTYPES[config.model.dtype]
        self.modules = {
            s: GPTStage(config.model, layout.stage_layers[s], self._sharding())
            for rank in self.pipeline_ranks
            for s in self.placement.stages_of(rank)
        }
        self._check_schedule()
        channels = self._connect()
        self.optimizer = self._make_optimizer()
        self.stages = {
            s: Stage(module, recompute=s in self.schedule.recompute)
            for s, module in self.modules.items()
        }
        for stage in self.stages.values():
            stage.own_autograd_parameters()
        self._channels = channels
        self._feed = Feed(config, layout, mesh, self.pipeline_ranks)
        self._executors = self._make_executors(self.schedule, train=True)
        self._validators: dict[int, tuple[Schedule, list[Executor]]] = {}
        self._recorders = [Recorder(mesh.device) for _ in self.pipeline_ranks]
        self._recording: list[Executor] = []
        self.last = self.stages.get(self.placement.stages - 1)
        seed = config.run.seed
        self.optimizer.set_weights(lambda spec, out: spec.initialise(out, seed))

    def _check_schedule(self) -> None:
        """Refuse a schedule of another number of ranks, stages or micro-batches."""
        layout, placement = self.layout, self.placement
        whole = self.schedule.whole_microbatches
        sizes = (placement.ranks, placement.stages) == (layout.pp, layout.stages)
        if not sizes or whole != layout.microbatches:
            raise ScheduleError(
                f"schedule {self.schedule.name} has {placement.ranks} ranks, {placement.stages} "
                f"stages and {whole} micro-batches; the layout needs {layout.pp}, "
                f"{layout.stages} and {layout.microbatches}"
            )

    def _sharding(self) -> Sharding:
        return Sharding(self.mesh.tp, self.config.parallel.sequence_parallel, self.dtype)

    def _connect(self) -> list[Channels]:
        """This process' channel ends, one per pipeline rank that it runs."""
        if self.in_process:
            return list(InProcessChannels.connect(self.layout.pp))
        return [
            ProcessGroupChannels(
                self.mesh,
                pairs(self.placement),
                dtype=self.dtype,
                debug=self.config.pipeline.debug,
            )
        ]

    def _make_optimizer(self) -> Optimizer:
        placement = self.placement
        holders = [
            [0] if self.in_process else placement.holders(stage)
            for stage in range(placement.stages)
        ]
        buckets = make_buckets(
            self.modules, self.mesh, tied=self.config.model.tied_embeddings, holders=holders
        )
        return Optimizer(buckets, self.config.optimizer, self.mesh, placement.stages)

    def use(self, schedule: Schedule) -> None:
        """Go on with another schedule, on the same placement, from the next step on."""
        assert schedule.placement == self.placement
        assert schedule.recompute == self.schedule.recompute
        self.schedule = schedule
        self._check_schedule()
        self._executors = self._make_executors(schedule, train=True)
        self._recording = []

    def _make_executors(
        self, schedule: Schedule, *, train: bool, record: bool = False
    ) -> list[Executor]:
        recorders = self._recorders if record else [None] * len(self.pipeline_ranks)
        return [
            Executor(
                program,
                {s: self.stages[s] for s in self.placement.stages_of(program.rank)},
                channels,
                shape=self._message_shape(schedule),
                train=train,
                recorder=recorder,
            )
            for program, channels, recorder in zip(
                lower(schedule, self.pipeline_ranks), self._channels, recorders, strict=True
            )
        ]

    def _message_shape(self, schedule: Schedule) -> MessageShape:
        """[slice length (/tp), rows, hidden] of what is sent for a (micro-batch, slice)."""
        split = self.layout.tp if self.config.parallel.sequence_parallel else 1
        train, hidden = self.config.train, self.config.model.hidden
        lengths = self.layout.slice_lengths if schedule.slices > 1 else (train.sequence_length,)

        def shape(microbatch: int, part: int) -> tuple[int, int, int]:
            rows = int(schedule.size_of(microbatch) * train.microbatch)
            return lengths[part] // split, rows, hidden

        return shape

    def train(self, step: int, rows: Rows, *, record: bool = False) -> StepResult:
        """Optimizer step `step`, counted from 0.

        With `record`, :meth:`records` then tells when each op ran. Raises :class:`NumericError`
        before an update with a gradient that is not finite.
        """
        first = step * self.config.train.global_batch
        microbatches, count = self._feed.fetch(self.schedule, rows, step, first)
        self.optimizer.zero_grad()
        if record:
            self._recording = self._recording or self._make_executors(
                self.schedule, train=True, record=True
            )
            self.mesh.barrier()
        self._run(self._recording if record else self._executors, microbatches)
        loss_sum = self._loss_sum()
        squares = self.optimizer.reduce()
        norm = total_norm(squares)
        loss = loss_sum / max(count, 1)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise NumericError(
                f"step {step + 1}: loss {loss}, gradient norm {norm.item()} "
                f"({self._not_finite(squares)}): not finite; "
                "lower optimizer.lr or resume from an earlier checkpoint"
            )
        lr = learning_rate(self.config.optimizer, step, self.config.train.steps)
        self.optimizer.update(lr, norm)
        return StepResult(loss=loss, grad_norm=norm.item(), lr=lr, tokens=count)

    def records(self) -> list[Record]:
        """The last recorded step of every pipeline rank, on the processes of the first one."""
        own = [recorder.record() for recorder in self._recorders]
        return [record for records in self.mesh.gather(own, "pp") for record in records]

    def _not_finite(self, squares: Tensor) -> str:
        """Where in the model the gradients are not finite."""
        stages = [str(s) for s in range(self.placement.stages) if not squares[s].isfinite()]
        parts = [f"stages {', '.join(stages)}"] if stages else []
        if not squares[-1].isfinite():
            parts.append("the tied embedding")
        return "gradients of " + (" and ".join(parts) or "no stage")

    def evaluate(self, rows: Rows, samples: int) -> tuple[float, int]:
        """Mean loss per unmasked token over samples 0 .. `samples` - 1, and their count.

        The last batch is filled up with rows that are masked here, whatever they hold.
        """

        def masked(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
            tokens, labels, mask = rows(indices)
            inside = torch.tensor([i < samples for i in indices])
            return tokens, labels, mask & inside.unsqueeze(1)

        per_microbatch = self.config.train.microbatch * self.layout.dp
        left = -(-samples // per_microbatch)
        first, total, tokens = 0, 0.0, 0
        while left:
            m = min(left, VALIDATION_MICROBATCHES)
            if m not in self._validators:
                schedule = forward_only(self.placement, m)
                self._validators[m] = schedule, self._make_executors(schedule, train=False)
            schedule, executors = self._validators[m]
            microbatches, count = self._feed.fetch(schedule, masked, 0, first)
            self._run(executors, microbatches)
            total += self._loss_sum()
            tokens += count
            first += m * per_microbatch
            left -= m
        return total / max(tokens, 1), tokens

    def _run(self, executors: list[Executor], microbatches: Mapping[Key, MicroBatch]) -> None:
        if self.in_process:
            run_together(executors, microbatches)
        else:
            executors[0].run(microbatches)

    def _loss_sum(self) -> float:
        """Sum of all unmasked token losses, micro-batches in order, then ranks in order."""
        total = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        if self.last is not None:
            for key in sorted(self.last.loss_sums):
                total += self.last.loss_sums[key]
        return self.mesh.ordered_sum(total, "dp", "pp").item()
