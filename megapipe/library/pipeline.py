"""A pipeline of a list of modules, for a user-defined training loop.

One process can run all pipeline ranks, to study the order of operations and its effects in a
notebook. Over a process group each rank runs its own stages. Both use the engine of training. The
pipeline does not update the modules; that is up to a user-defined optimizer::

    pipe = Pipeline(modules, schedule="1f1b", microbatches=4, ranks=2)
    optimizer = torch.optim.AdamW(pipe.parameters())
    loss = pipe.step((inputs, targets))     # forward and backward of all micro-batches
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.engine.channels import (
    Channels,
    InProcessChannels,
    MessageShape,
    ProcessGroupChannels,
)
from megapipe.engine.executor import Executor, run_together
from megapipe.engine.packed import PackedChannels, PackedTensor
from megapipe.engine.stage import Key, Stage
from megapipe.engine.tuple_stage import TupleStage
from megapipe.errors import ConfigError
from megapipe.library.arguments import (
    Tensors,
    cost_of,
    fitting,
    list_of_modules,
    number_of_ranks,
    tensors_of,
)
from megapipe.library.holders import SharedStageGrads
from megapipe.library.objective import Objective
from megapipe.library.shapes import outputs
from megapipe.library.stage import PlainStage, TensorMicroBatch
from megapipe.model.partition import StageSpec, balanced, from_counts, parse_layout
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.load import load
from megapipe.schedule.lower import lower, pairs
from megapipe.text import nearest_multiples
from megapipe.train.feed import work_items


class Pipeline:
    """The stages of `modules` that this process runs, under a schedule.

    Args:
        modules: modules with their values, or an ``nn.Sequential``. Each module takes the output of
            the previous one: a tensor, or a tuple of tensors as separate arguments. The first
            dimension of every tensor counts samples.
        schedule: a registered name, ``module:function``, a CSV file, or a
            :class:`~megapipe.schedule.ir.Schedule`. Schedules that cut sequences into slices are
            refused.
        microbatches: number of micro-batches per step. A batch is divided into equal micro-batches.
        ranks: number of pipeline ranks; by default two, or the size of the process group.
        chunks: number of stages per rank (model chunks), for schedules that take this argument.
        layout: number of modules of each stage, as a list or as text: ``"L*2 | L*3"``. By default
            stages have about equally many parameters, not counting embeddings.
        loss: a function (output of the last module, targets) -> loss, []. By default the
            cross-entropy of logits [..., V] with labels [...], in nats: the mean over the batch,
            with a mask [...] over its unmasked labels.
        reduction: how the values of `loss`, one per micro-batch, are combined: ``mean`` takes their
            mean, for a loss that is a mean over its samples; ``sum`` takes their sum. Either way
            the result is the loss of the whole batch.
        seed: seed of the random numbers that modules draw while they run. The numbers depend on
            seed, step, micro-batch and module, but not on the schedule or the number of ranks.
        distributed: run over the ranks of torch's default process group, one pipeline rank in each.
            Every rank makes all modules, with the same values, and runs its own stages.
        timeout_s: how long ranks wait for each other, in seconds.

    Raises:
        ConfigError: modules, schedule and sizes do not fit each other.
        LaunchError: no process group, or a group of another size.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        schedule: str | Schedule = "1f1b",
        microbatches: int = 4,
        ranks: int | None = None,
        chunks: int | None = None,
        layout: str | Sequence[int] | None = None,
        loss: Callable[..., Tensor] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        seed: int = 0,
        distributed: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self.modules = list_of_modules(modules)
        """All modules, also those of other ranks."""
        self._objective = Objective(loss, reduction)
        ranks = number_of_ranks(ranks, schedule, distributed=distributed)
        if isinstance(schedule, str):
            schedule = load(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
        self.schedule = fitting(schedule, ranks, microbatches)
        self.stage_specs = self._cut(layout)
        """All stages; ``layers`` of a stage are the indices of its modules."""
        self.seed = seed
        self.steps = 0
        """Number of steps taken; random numbers depend on this count."""
        parameters = [p for module in self.modules for p in module.parameters()]
        if not any(p.requires_grad for p in parameters):
            raise ConfigError("modules: none has a parameter with requires_grad=True")
        self.device = parameters[0].device
        placement = self.schedule.placement
        self._mesh: ParallelMesh | None = None
        self._holders: SharedStageGrads | None = None
        self._here = range(ranks)
        if distributed:
            own = [list(self._parameters_of([s])) for s in range(placement.stages)]
            holders = [placement.holders(s) for s in range(placement.stages)]
            SharedStageGrads.check(own, holders)
            mesh = ParallelMesh(Grid(pp=ranks), device=self.device, timeout_s=timeout_s)
            self._mesh, self._here = mesh, range(mesh.rank, mesh.rank + 1)
            self._holders = SharedStageGrads(own, holders, mesh)
        numbers = sorted({s for rank in self._here for s in placement.stages_of(rank)})
        self._stages = {s: self._stage(s) for s in numbers}
        self._programs = lower(self.schedule, self._here)
        self._channels: list[Channels] | None = None
        self._executors: dict[tuple[Any, ...], list[Executor]] = {}
        """Executors by the shapes of a batch's inputs."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters whose gradients :meth:`step` computes in this process, each one
        once: parameters of all modules, or with a process group only of this rank's stages."""
        return self._parameters_of(self._stages)

    def step(self, batch: Sequence[Tensors]) -> float:
        """Run forward and backward of all micro-batches, and return the batch's loss on every rank.

        Gradients are added to the ``.grad`` of the parameters, as ``loss.backward()`` does. Modules
        are put into training mode.

        Args:
            batch: inputs, then the arguments of the loss: (inputs, targets), or (tokens, labels,
                mask). Each is a tensor or a tuple of tensors, with equally many samples. Every rank
                gets the whole batch.

        Raises:
            ConfigError: samples do not divide into the micro-batches. An exception of a module is
                passed on; some gradients of the step may have been added by then.
        """
        inputs, targets = tensors_of(batch, self.device)
        microbatches = self._microbatches(inputs, targets)
        executors = self._made(microbatches, inputs)
        self.steps += 1
        try:
            with torch.enable_grad():
                self._run(executors, microbatches)
        except BaseException:  # messages of this step must not meet those of the next
            self._executors.clear()
            if self._mesh is None:
                self._channels = None
            raise
        return self._loss(microbatches)

    def _run(self, executors: list[Executor], microbatches: dict[Key, TensorMicroBatch]) -> None:
        if self._holders is None:
            run_together(executors, microbatches)
            return
        with self._holders.summed():
            executors[0].run(microbatches)

    def _loss(self, microbatches: dict[Key, TensorMicroBatch]) -> float:
        total = torch.zeros(1, dtype=torch.float64)
        last = self._stages.get(self.schedule.placement.stages - 1)
        if last is not None:
            for key in sorted(last.loss_sums):
                total += last.loss_sums[key].item() * microbatches[key].scale
        if self._mesh is not None:
            total = self._mesh.ordered_sum(total, "pp")
        return total.item()

    def _cut(self, layout: str | Sequence[int] | None) -> tuple[StageSpec, ...]:
        placement, count = self.schedule.placement, len(self.modules)
        if placement.stages > count:
            raise ConfigError(
                f"modules: {count} for {placement.stages} stages of schedule {self.schedule.name}: "
                "expected at least one for each"
            )
        if layout is None:
            layout = balanced([cost_of(module) for module in self.modules], placement, ends=False)
        elif not isinstance(layout, str):
            layout = from_counts(layout, ends=False)
        specs = parse_layout(layout, count, ends=False)
        if len(specs) != placement.stages:
            raise ConfigError(
                f"layout={layout!r} has {len(specs)} stages: expected {placement.stages}, as "
                f"schedule {self.schedule.name} has"
            )
        return specs

    def _stage(self, number: int) -> Stage:
        stages = self.schedule.placement.stages
        module = PlainStage(
            {i: self.modules[i] for i in self.stage_specs[number].layers},
            first=number == 0,
            last=number == stages - 1,
            criterion=self._objective.loss,
        )
        return TupleStage(module, recompute=number in self.schedule.recompute)

    def _parameters_of(self, stages: Sequence[int] | dict[int, Stage]) -> Iterator[Parameter]:
        numbers = sorted({i for s in stages for i in self.stage_specs[s].layers})
        found = {p: None for i in numbers for p in self.modules[i].parameters()}
        return iter(found)

    def _microbatches(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> dict[Key, TensorMicroBatch]:
        samples = {len(each) for each in (*inputs, *targets)}
        if len(samples) > 1:
            raise ConfigError(f"batch: tensors of {sorted(samples)} samples: expected equally many")
        (batch,) = samples
        whole = int(self.schedule.whole_microbatches)
        smallest = max(size.denominator for size in self.schedule.sizes or (1,))
        if batch % (whole * smallest) or not batch:
            raise ConfigError(
                f"batch: {batch} samples do not divide into {whole} micro-batches of schedule "
                f"{self.schedule.name}: {nearest_multiples(batch, whole * smallest)}"
            )
        rows = batch // whole
        weigh = self._objective.weights(targets, batch)
        found = {}
        for piece in work_items(self.schedule, rows, (1,)):
            first = piece.whole * rows
            here = slice(first + piece.rows.start, first + piece.rows.stop)
            found[piece.key] = TensorMicroBatch(
                index=piece.whole,
                step=self.steps,
                seed=self.seed,
                scale=weigh(here.stop - here.start),
                first_row=piece.rows.start,
                inputs=tuple(each[here] for each in inputs),
                targets=tuple(each[here] for each in targets),
            )
        return found

    def _made(
        self, microbatches: dict[Key, TensorMicroBatch], inputs: tuple[Tensor, ...]
    ) -> list[Executor]:
        """Return the executors for inputs of these shapes, made on first use."""
        key = tuple((tuple(each.shape), each.dtype) for each in inputs)
        if key not in self._executors:
            shape = self._message_shape(microbatches)
            if self._channels is None:
                self._channels = self._connect()
            placement = self.schedule.placement
            self._executors[key] = [
                Executor(
                    program,
                    {s: self._stages[s] for s in placement.stages_of(program.rank)},
                    channels,
                    shape=shape,
                    train=True,
                )
                for program, channels in zip(self._programs, self._channels, strict=True)
            ]
        return self._executors[key]

    def _connect(self) -> list[Channels]:
        placement = self.schedule.placement
        if self._mesh is None:
            return list(InProcessChannels.connect(placement.ranks))
        lines = ProcessGroupChannels(self._mesh, pairs(placement), dtype=torch.uint8)
        return [PackedChannels(lines)]

    def _message_shape(self, microbatches: dict[Key, TensorMicroBatch]) -> MessageShape:
        """Return the function from an operation to shapes and types of its message's tensors. If
        one process runs all ranks, the function returns (), as no receive needs shapes."""
        if self._mesh is None:
            return lambda message: ()
        found: dict[int, list[tuple[PackedTensor, ...]]] = {}

        def shape(message: Op) -> list[PackedTensor]:
            inputs = microbatches[message.microbatch, 0].inputs
            rows = len(inputs[0])
            if rows not in found:
                found[rows] = outputs(self.modules, inputs)
            before = message.stage - (message.kind != Kind.F)
            parts = found[rows][self.stage_specs[before].layers[-1]]
            return [p for p in parts if message.kind == Kind.F or p.dtype.is_floating_point]

        return shape
