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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config import Config
from megapipe.engine.channels import Channels, InProcessChannels, ProcessGroupChannels
from megapipe.engine.executor import Executor, run_together
from megapipe.engine.stage import Stage
from megapipe.errors import NumericError, ScheduleError
from megapipe.layout import Layout
from megapipe.mesh import ParallelMesh
from megapipe.model.gpt import TORCH_DTYPES, GPTStage
from megapipe.model.microbatch import MicroBatch
from megapipe.optim.buffers import make_buckets
from megapipe.optim.lr import learning_rate
from megapipe.optim.zero import Optimizer, total_norm
from megapipe.schedule.generators import build, forward_only
from megapipe.schedule.ir import Schedule
from megapipe.schedule.lower import lower, pairs
from megapipe.tensor_parallel.parameter import Sharding

Rows = Callable[[Sequence[int]], tuple[Tensor, Tensor, Tensor]]
"""Global sample indices -> tokens [b, s], labels [b, s], mask [b, s]."""

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
        pipeline = config.pipeline
        self.schedule = schedule or build(
            pipeline.schedule,
            ranks=layout.pp,
            microbatches=layout.microbatches,
            chunks=layout.chunks,
            group=pipeline.group,
        )
        self.placement = self.schedule.placement
        self.in_process = pipeline.channels == "in_process"
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
        self.stages = {s: Stage(module) for s, module in self.modules.items()}
        for stage in self.stages.values():
            stage.own_autograd_parameters()
        self._channels = channels
        self._executors = self._make_executors(self.schedule, train=True)
        self._validators: dict[int, list[Executor]] = {}
        self.last = self.stages.get(self.placement.stages - 1)
        seed = config.run.seed
        self.optimizer.set_weights(lambda spec, out: spec.initialise(out, seed))

    def _check_schedule(self) -> None:
        """Refuse a schedule of another number of ranks, stages or micro-batches."""
        layout, placement = self.layout, self.placement
        wanted = (layout.pp, layout.stages, layout.microbatches)
        if (placement.ranks, placement.stages, self.schedule.microbatches) != wanted:
            raise ScheduleError(
                f"schedule {self.schedule.name} has {placement.ranks} ranks, {placement.stages} "
                f"stages and {self.schedule.microbatches} micro-batches; the layout needs "
                f"{wanted[0]}, {wanted[1]} and {wanted[2]}"
            )

    def _sharding(self) -> Sharding:
        return Sharding(self.mesh.tp, self.config.parallel.sequence_parallel, self.dtype)

    def _connect(self) -> list[Channels]:
        """This process' channel ends, one per pipeline rank that it runs."""
        if self.in_process:
            return list(InProcessChannels.connect(self.layout.pp))
        split = self.layout.tp if self.config.parallel.sequence_parallel else 1
        train = self.config.train
        shape = (train.sequence_length // split, train.microbatch, self.config.model.hidden)
        return [
            ProcessGroupChannels(
                self.mesh,
                pairs(self.placement),
                shape=lambda microbatch, slice_: shape,
                dtype=self.dtype,
                debug=self.config.pipeline.debug,
            )
        ]

    def _make_optimizer(self) -> Optimizer:
        stages = self.placement.stages
        holders = [self.placement.rank_of(s) for s in (0, stages - 1)]
        buckets = make_buckets(
            self.modules,
            self.mesh,
            stages=stages,
            tied=self.config.model.tied_embeddings,
            holders=[0] if self.in_process else holders,
        )
        return Optimizer(buckets, self.config.optimizer, self.mesh, stages)

    def _make_executors(self, schedule: Schedule, *, train: bool) -> list[Executor]:
        return [
            Executor(
                program,
                {s: self.stages[s] for s in self.placement.stages_of(program.rank)},
                channels,
                train=train,
            )
            for program, channels in zip(
                lower(schedule, self.pipeline_ranks), self._channels, strict=True
            )
        ]

    def train(self, step: int, rows: Rows) -> StepResult:
        """Optimizer step `step`, counted from 0. Raises :class:`NumericError` before an update
        with a gradient that is not finite."""
        batch = self.config.train.global_batch
        microbatches, count = self._fetch(
            rows, step, first=step * batch, microbatches=self.layout.microbatches
        )
        self.optimizer.zero_grad()
        self._run(self._executors, microbatches)
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
                program = forward_only(self.placement, m)
                self._validators[m] = self._make_executors(program, train=False)
            microbatches, count = self._fetch(masked, 0, first=first, microbatches=m)
            self._run(self._validators[m], microbatches)
            total += self._loss_sum()
            tokens += count
            first += m * per_microbatch
            left -= m
        return total / max(tokens, 1), tokens

    def _fetch(
        self, rows: Rows, step: int, *, first: int, microbatches: int
    ) -> tuple[list[MicroBatch], int]:
        """This replica's micro-batches of the samples from `first` on, and the number of
        unmasked tokens over all replicas. Micro-batch i of replica d is number i * dp + d of the
        global batch, in every layout."""
        b, dp, d = self.config.train.microbatch, self.layout.dp, self.mesh.dp.index
        ends = self.last is not None or 0 in self.stages
        fetched: list[tuple[Tensor, Tensor, Tensor]] = []
        if ends:
            for i in range(microbatches):
                start = first + (i * dp + d) * b
                fetched.append(rows(range(start, start + b)))
        own = sum(int(mask.sum()) for _, _, mask in fetched) if self.last is not None else 0
        count = torch.tensor([own], dtype=torch.float64)
        total = int(self.mesh.ordered_sum(count, "dp", "pp").item())
        result = []
        for i in range(microbatches):
            tokens, labels, mask = fetched[i] if ends else (None, None, None)
            result.append(
                MicroBatch(
                    index=i * dp + d,
                    step=step,
                    seed=self.config.run.seed,
                    scale=1.0 / total if total else 0.0,
                    tokens=self._on_device(tokens),
                    labels=self._on_device(labels),
                    mask=self._on_device(mask),
                )
            )
        return result, total

    def _on_device(self, rows: Tensor | None) -> Tensor | None:
        return None if rows is None else rows.to(self.mesh.device)

    def _run(self, executors: list[Executor], microbatches: Sequence[MicroBatch]) -> None:
        if self.in_process:
            run_together(executors, microbatches)
        else:
            executors[0].run(microbatches)

    def _loss_sum(self) -> float:
        """Sum of all unmasked token losses, micro-batches in order, then replicas in order."""
        total = torch.zeros(1, dtype=torch.float64, device=self.mesh.device)
        if self.last is not None:
            for microbatch in sorted(self.last.loss_sums):
                total += self.last.loss_sums[microbatch]
        return self.mesh.ordered_sum(total, "dp", "pp").item()
