"""What runs schedules on this process: programs, executors and the channels between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from megapipe.config import Config
from megapipe.engine.channels import (
    Channels,
    InProcessChannels,
    MessageShape,
    ProcessGroupChannels,
)
from megapipe.engine.executor import Executor, Opening, run_together
from megapipe.engine.names import named
from megapipe.engine.recorder import Record, Recorder
from megapipe.engine.shares import SharingChannels
from megapipe.engine.stage import Key, Stage
from megapipe.layout import Layout
from megapipe.mesh import ParallelMesh
from megapipe.model.gpt import TORCH_DTYPES
from megapipe.model.microbatch import MicroBatch
from megapipe.optim.optimizer import Optimizer
from megapipe.plan.links import scatters
from megapipe.schedule.ir import Schedule
from megapipe.schedule.lower import Program, lower, pairs
from megapipe.schedule.opening import arriving, cut, opening
from megapipe.schedule.placement import Placement
from megapipe.schedule.synchronise import for_zero


class Pipeline:
    """The pipeline ranks of this process, and the ends of their channels.

    All schedules that it runs have the same `placement`. `chunked_loss`: the head's weight gradient
    is part of the input gradient.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        mesh: ParallelMesh,
        placement: Placement,
        *,
        chunked_loss: bool,
    ) -> None:
        self.config = config
        self.layout = layout
        self.mesh = mesh
        self.placement = placement
        self.chunked_loss = chunked_loss
        self.in_process = config.pipeline.channels == "in_process"
        self.ranks: Sequence[int] = range(layout.pp) if self.in_process else [mesh.pp.index]
        self._channels = self._connect()
        self._recorders = [Recorder(mesh.device) for _ in self.ranks]

    def _connect(self) -> list[Channels]:
        """This process' channel ends, one per pipeline rank that it runs."""
        if self.in_process:
            return list(InProcessChannels.connect(self.layout.pp))
        channels = ProcessGroupChannels(
            self.mesh,
            pairs(self.placement),
            dtype=TORCH_DTYPES[self.config.model.dtype],
            debug=self.config.pipeline.debug,
        )
        return [SharingChannels(channels, self.mesh.tp) if scatters(self.config) else channels]

    def executors(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        optimizer: Optimizer,
        *,
        train: bool,
        record: bool = False,
        name: bool = False,
    ) -> list[Executor]:
        """What runs `schedule` on each of the pipeline ranks here.

        `stages` are those of the process by number; `optimizer` reduces their gradients and gathers
        their weights. With `record`, :meth:`records` tells when each operation ran. With `name`
        profilers are told what runs.
        """
        recorders = self._recorders if record else [None] * len(self.ranks)
        executors = [
            Executor(
                program,
                {s: stages[s] for s in self.placement.stages_of(program.rank)},
                channels,
                shape=self._message_shape(schedule),
                train=train,
                recorder=recorder,
                wrap=partial(named, device=self.mesh.device) if name else None,
                replicas=optimizer,
            )
            for program, channels, recorder in zip(
                self._programs(schedule, optimizer), self._channels, recorders, strict=True
            )
        ]
        if train and self.config.optimizer.post_validation:
            _set_opening(executors[0], schedule)
        return executors

    def run(self, executors: list[Executor], microbatches: Mapping[Key, MicroBatch]) -> None:
        """Run one step, or one batch of validation, on all pipeline ranks here."""
        if self.in_process:
            run_together(executors, microbatches)
        else:
            executors[0].run(microbatches)

    def records(self) -> list[Record]:
        """The last recorded step of every pipeline rank, on the processes of the first one."""
        own = [recorder.record() for recorder in self._recorders]
        return [record for records in self.mesh.gather(own, "pp") for record in records]

    def _programs(self, schedule: Schedule, optimizer: Optimizer) -> Iterator[Program]:
        """What the pipeline ranks here do, with what their replicas do together."""
        policy = optimizer.policy
        return for_zero(
            lower(schedule, self.ranks),
            schedule,
            zero=policy.stage,
            prefetch=policy.prefetch,
            chunked_loss=self.chunked_loss,
        )

    def _message_shape(self, schedule: Schedule) -> MessageShape:
        """[slice length (/tp), rows, hidden] of what is sent for a (micro-batch, slice)."""
        split = self.layout.tp if self.config.parallel.sequence_parallel else 1
        train, hidden = self.config.train, self.config.model.hidden
        lengths = self.layout.slice_lengths if schedule.slices > 1 else (train.sequence_length,)

        def shape(microbatch: int, part: int) -> tuple[int, int, int]:
            rows = int(schedule.size_of(microbatch) * train.microbatch)
            return lengths[part] // split, rows, hidden

        return shape


def _set_opening(executor: Executor, schedule: Schedule) -> None:
    """Tell where the executor's steps can be given up."""
    rank, operations = executor.program.rank, opening(schedule)
    executor.set_opening(
        Opening(cut(executor.program, operations[rank]), arriving(schedule, rank, operations))
    )
