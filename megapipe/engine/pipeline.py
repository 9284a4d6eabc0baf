"""The pipeline on this process: programs, executors and the channels between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch

from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.async_runner import AsyncRunner, VersionedWeights
from megapipe.engine.channels import (
    Channels,
    InProcessChannels,
    MessageShape,
    ProcessGroupChannels,
)
from megapipe.engine.executor import DataParallelHooks, Executor, Speculation, run_together
from megapipe.engine.packed import PackedChannels
from megapipe.engine.profiler_names import named
from megapipe.engine.recorder import Record, Recorder
from megapipe.engine.scatter_gather import ScatterGatherChannels
from megapipe.engine.stage import Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.schedule.data_parallel import ReplicaPolicy, with_zero_actions
from megapipe.schedule.ir import Schedule
from megapipe.schedule.lower import lower, pairs
from megapipe.schedule.placement import Placement
from megapipe.schedule.program import Program
from megapipe.schedule.speculation import arriving, cut, speculation

ShapeOf = Callable[[Schedule], MessageShape]
"""Function that returns the shapes of a schedule's messages."""


class Pipeline:
    """The pipeline ranks of this process, and the ends of their channels.

    All schedules of a pipeline have the same `placement`; `policy` says when data-parallel replicas
    communicate. `shape_of` returns the shapes of messages, whose type is `dtype`. With `packed` a
    message can have several tensors.

    With `in_process` this process runs all pipeline ranks. With `scatter` each tp rank sends a
    shard of a message that all tp ranks have. With `debug` messages carry headers that are checked.
    Receives are posted `receive_ahead` operations before need: by default one on NCCL, where a
    waiting receive occupies a multiprocessor, and otherwise as early as possible. NCCL runs at most
    `ctas` thread blocks for each channel.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        placement: Placement,
        policy: ReplicaPolicy,
        *,
        shape_of: ShapeOf,
        dtype: torch.dtype,
        in_process: bool = False,
        scatter: bool = False,
        packed: bool = False,
        debug: bool = False,
        receive_ahead: int | None = None,
        ctas: int = 1,
    ) -> None:
        self.mesh = mesh
        self.placement = placement
        self.policy = policy
        self.shape_of = shape_of
        self.in_process = in_process
        self._debug = debug
        early = 1 if mesh.backend == "nccl" else None
        self.receive_ahead = early if receive_ahead is None else receive_ahead
        self.ranks: Sequence[int] = range(placement.ranks) if in_process else [mesh.pp.index]
        self._channels = self._connect(
            dtype, scatter=scatter, packed=packed, debug=debug, ctas=ctas
        )
        self._recorders = [Recorder(mesh.device) for _ in self.ranks]

    def _connect(
        self, dtype: torch.dtype, *, scatter: bool, packed: bool, debug: bool, ctas: int
    ) -> list[Channels]:
        """Return the channel ends of each pipeline rank that this process runs."""
        if self.in_process:
            return list(InProcessChannels.connect(self.placement.ranks))
        wire = torch.uint8 if packed else dtype
        used = pairs(self.placement)
        channels = ProcessGroupChannels(self.mesh, used, dtype=wire, debug=debug, ctas=ctas)
        if packed:
            return [PackedChannels(channels)]
        return [ScatterGatherChannels(channels, self.mesh.tp) if scatter else channels]

    def executors(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        synchroniser: DataParallelHooks,
        *,
        train: bool,
        proved: bool = False,
        record: bool = False,
        name: bool = False,
        speculate: bool = False,
        shape: MessageShape | None = None,
    ) -> list[Executor]:
        """Make the executors of `schedule`, one for each pipeline rank of this process.

        `stages`: the process's stages by number. `synchroniser` reduces their gradients and gathers
        their weights. `proved`: the schedule has been validated. With `record`, :meth:`records`
        returns when each operation ran. With `name`, profilers see names of actions. With
        `speculate`, a step can start with a prefix that can be undone
        (:meth:`Executor.run_prefix`). `shape` returns the shapes of messages (default: `shape_of`).
        """
        recorders = self._recorders if record else [None] * len(self.ranks)
        executors = [
            Executor(
                program,
                {s: stages[s] for s in self.placement.stages_of(program.rank)},
                channels,
                shape=shape or self.shape_of(schedule),
                train=train,
                recorder=recorder,
                wrap=partial(named, device=self.mesh.device) if name else None,
                synchroniser=synchroniser,
                receive_ahead=self.receive_ahead,
                journal=self.mesh.journal,
            )
            for program, channels, recorder in zip(
                self._programs(schedule, proved=proved), self._channels, recorders, strict=True
            )
        ]
        if speculate:
            _set_speculation(executors[0], schedule)
        return executors

    def flows(
        self,
        stages: Mapping[int, Stage],
        weights: VersionedWeights,
        *,
        window: int,
        shape: MessageShape,
        agree: bool,
    ) -> list[AsyncRunner]:
        """Make the runners of a no-flush schedule with `window` micro-batches per update, one for
        each pipeline rank of this process. `weights` holds the weight versions. `agree`: a
        micro-batch must read one version at all stages, which debug mode checks."""
        counting = {s: rank for rank in self.ranks for s in self.placement.stages_of(rank)}
        return [
            AsyncRunner(
                {s: stages[s] for s in self.placement.stages_of(rank)},
                channels,
                weights,
                counted={s: stages[s] for s, of in counting.items() if of == rank},
                window=window,
                shape=shape,
                agree=agree and self._debug,
                recorder=recorder,
                name=partial(named, device=self.mesh.device),
                receive_ahead=self.receive_ahead,
                journal=self.mesh.journal,
            )
            for rank, channels, recorder in zip(
                self.ranks, self._channels, self._recorders, strict=True
            )
        ]

    def run(self, executors: list[Executor], microbatches: Mapping[Key, MicroBatch]) -> None:
        """Run one step, or one validation batch, on all pipeline ranks of this process."""
        if self.in_process:
            run_together(executors, microbatches)
        else:
            executors[0].run(microbatches)

    def records(self) -> list[Record]:
        """Gather the most recently recorded step of all pipeline ranks on the processes of pipeline
        rank 0. Other processes return an empty list."""
        own = json.dumps([recorder.record() for recorder in self._recorders])
        return [
            Record.of(values) for text in self.mesh.gather(own, "pp") for values in json.loads(text)
        ]

    def _programs(self, schedule: Schedule, *, proved: bool) -> Iterator[Program]:
        """Return the programs of local pipeline ranks, with their data-parallel collectives."""
        return with_zero_actions(lower(schedule, self.ranks, proved=proved), schedule, self.policy)


def _set_speculation(executor: Executor, schedule: Schedule) -> None:
    """Let steps of `executor` start with the prefix of `schedule` that can be undone."""
    rank, operations = executor.program.rank, speculation(schedule)
    executor.set_speculation(
        Speculation(cut(executor.program, operations[rank]), arriving(schedule, rank, operations))
    )
