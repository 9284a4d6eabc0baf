"""One pipeline of stages without work, in megapipe and in torch.distributed.pipelining.

Both run through their real stages, schedules and gloo channels, and autograd records and walks a
graph of one operation per stage: what is left is the engine. Stages can sleep for each operation;
then the time of a step is that of the schedule, whatever the number of cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.channels import ProcessGroupChannels, Shape
from megapipe.engine.executor import Executor
from megapipe.engine.recorder import Recorder
from megapipe.engine.stage import Key, Stage
from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.weight_grad import WeightGradQueue
from megapipe.model.interface import StageModule
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.lower import lower, pairs
from megapipe.schedule.placement import Placement
from megapipe.train.feed import work_items

ROWS = 2
"""Rows of a micro-batch, so that it has halves."""

TORCH: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "breadth_first": ScheduleLoopedBFS,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
    "dualpipe_v": ScheduleDualPipeV,
}
"""The schedules that torch has too, by our names."""


class Sleeper:
    """Sleeps for the operations of a stage, once it is `on`; before, they are only counted."""

    def __init__(self, seconds: Sequence[float]) -> None:
        self.seconds = seconds
        """Seconds by kind, for a whole micro-batch."""
        self.on = False
        self.ops = [0] * len(Kind)

    def __call__(self, kind: Kind, share: float = 1.0) -> None:
        self.ops[kind] += 1
        if self.on:
            time.sleep(self.seconds[kind] * share)


def whole_inputs(microbatches: int, length: int) -> Tensor:
    """Return the inputs of the first stage, [m, s, b, 1]. Their sum is the loss."""
    count = microbatches * length * ROWS
    return torch.arange(count, dtype=torch.float32).view(microbatches, length, ROWS, 1) % 7


class _NoWork:
    """A queued weight gradient without work."""

    def begin(self) -> None:
        pass

    def run(self) -> None:
        pass

    def tensors(self) -> tuple[Tensor, ...]:
        return ()


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.queue = queue
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.queue.put(_NoWork())
        return grads[0], None, None


class _Idle(nn.Module):
    """The interface that megapipe's stage needs of a model chunk; `tokens` are hidden states
    already."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.is_first, self.is_last = first, last
        self.queue = WeightGradQueue()

    def forward(
        self,
        x: Tensor | None,
        mb: MicroBatch,
        cache: KVCache | None = None,
        *,
        skip_output: bool = False,
    ) -> Tensor:
        x = mb.tokens if x is None else x
        y = cast(Tensor, _Pass.apply(x, self.weight, self.queue))
        if not self.is_last:
            return y
        assert mb.mask is not None
        return (y.squeeze(2) * mb.mask.t()).sum()


class _SleepingStage(Stage):
    """A stage that sleeps; `share_of` returns the share of a whole micro-batch that a key is."""

    def __init__(
        self,
        module: StageModule,
        sleep: Sleeper,
        share_of: Callable[[Key], float],
        *,
        recompute: bool,
    ) -> None:
        super().__init__(module, recompute=recompute)
        self.sleep = sleep
        self.share_of = share_of

    def forward(self, key: Key, x: Tensor | None, mb: MicroBatch) -> Tensor | None:
        self.sleep(Kind.F, self.share_of(key))
        return super().forward(key, x, mb)

    def recompute(self, key: Key) -> None:
        self.sleep(Kind.R, self.share_of(key))
        super().recompute(key)

    def input_grad(self, key: Key, grad: Tensor | None) -> Tensor | None:
        self.sleep(Kind.I, self.share_of(key))
        return super().input_grad(key, grad)

    def weight_grad(self, key: Key) -> None:
        self.sleep(Kind.W, self.share_of(key))
        super().weight_grad(key)


class _Counted:
    """The sender's end of a channel, with the number of messages sent through it."""

    def __init__(self, end: Any) -> None:
        self.end = end
        self.messages = 0
        self.acknowledge, self.finish = end.acknowledge, end.finish

    def send(self, message: Any, tensor: Tensor) -> None:
        self.messages += 1
        self.end.send(message, tensor)


class Ours:
    """A rank of megapipe's pipeline. `length` is that of a sequence, in fp32 values.

    With `sleepers` by stage, the stages sleep, the step is recorded and messages are counted.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        schedule: Schedule,
        length: int,
        sleepers: Mapping[int, Sleeper] | None = None,
    ) -> None:
        self.schedule = schedule
        slices, last = schedule.slices, schedule.placement.stages - 1

        def share_of(key: Key) -> float:
            return float(schedule.size_of(key[0]) / slices)

        def shape(message: Op) -> Shape:
            return length // slices, int(schedule.size_of(message.microbatch) * ROWS), 1

        self.stages: dict[int, Stage] = {}
        for stage in schedule.placement.stages_of(mesh.pp.index):
            module = cast(StageModule, _Idle(first=stage == 0, last=stage == last))
            again = stage in schedule.recompute
            self.stages[stage] = (
                _SleepingStage(module, sleepers[stage], share_of, recompute=again)
                if sleepers
                else Stage(module, recompute=again)
            )
        self.microbatches = _microbatches(schedule, length)
        self.channels = ProcessGroupChannels(mesh, pairs(schedule.placement), dtype=torch.float32)
        self.recorder = Recorder(mesh.device) if sleepers else None
        if sleepers:
            ends: dict[int, Any] = self.channels.outgoing
            ends.update({peer: _Counted(end) for peer, end in ends.items()})
        self.executor = Executor(
            lower(schedule, [mesh.pp.index])[0],
            self.stages,
            self.channels,
            shape=shape,
            train=True,
            recorder=self.recorder,
        )

    def step(self) -> None:
        self.executor.run(self.microbatches)

    def loss(self) -> float:
        """Return the sum of this rank's losses in the last step."""
        return sum(
            float(loss) for stage in self.stages.values() for loss in stage.loss_sums.values()
        )

    def messages(self) -> int:
        """Return the number of messages sent so far."""
        return sum(cast(_Counted, end).messages for end in self.channels.outgoing.values())


def _microbatches(schedule: Schedule, length: int) -> dict[Key, MicroBatch]:
    slices = schedule.slices
    whole = whole_inputs(int(schedule.whole_microbatches), length)
    result = {}
    for piece in work_items(schedule, ROWS, [length // slices] * slices):
        x = whole[piece.whole][piece.positions, piece.rows].contiguous()
        result[piece.key] = MicroBatch(
            index=piece.whole,
            step=0,
            seed=0,
            tokens=x,
            mask=torch.ones(x.shape[1], x.shape[0]),
            first_row=piece.rows.start,
            start=piece.positions.start,
            sequence_length=length if slices > 1 else None,
        )
    return result


class _Shift(nn.Module):
    """The smallest module whose backward torch's stages can split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class _SleepingTorchStage(PipelineStage):
    sleep: Sleeper

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.sleep(Kind.F)
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self.sleep(Kind.I)
        if full_backward:
            self.sleep(Kind.W)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        self.sleep(Kind.W)
        super().backward_weight_one_chunk(*args, **kwargs)


class Theirs:
    """A rank of torch's pipeline over the default process group, with the interface of `Ours`."""

    def __init__(
        self,
        rank: int,
        name: str,
        placement: Placement,
        microbatches: int,
        length: int,
        sleepers: Mapping[int, Sleeper] | None = None,
    ) -> None:
        stages = []
        for index in placement.stages_of(rank):
            kind = _SleepingTorchStage if sleepers else PipelineStage
            stage = kind(_Shift(), index, placement.stages, torch.device("cpu"))
            if isinstance(stage, _SleepingTorchStage):
                assert sleepers is not None
                stage.sleep = sleepers[index]
            stages.append(stage)
        single = issubclass(TORCH[name], PipelineScheduleSingle)
        self.schedule = TORCH[name](
            stages[0] if single else stages,
            microbatches,
            loss_fn=lambda y, mask: (y * mask).sum(),
            scale_grads=False,
        )
        x = whole_inputs(microbatches, length).flatten(0, 1)
        self.arguments = (x,) if any(stage.is_first for stage in stages) else ()
        self.target = torch.ones_like(x) if any(stage.is_last for stage in stages) else None
        self.losses: list[Tensor] = []

    def step(self) -> None:
        self.schedule.step(
            *self.arguments, target=self.target, losses=self.losses, return_outputs=False
        )

    def loss(self) -> float:
        """Return the sum of this rank's losses in the last step."""
        return sum(float(loss.detach()) for loss in self.losses)
