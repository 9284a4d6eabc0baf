"""Decisions that follow from several keys of a configuration, worked out once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from megapipe.context.split import PositionSplit
from megapipe.layers.policy import BlockSpan
from megapipe.layout.context_plan import ContextPlans
from megapipe.layout.replicas import max_replicas
from megapipe.model.interface import ModelSpec
from megapipe.model.partition import StageSpec
from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.ir import Schedule
from megapipe.schedule.streams.stream import AsyncSchedule, finite

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh and of the pipeline, and what each stage holds."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    """Sizes of expert parallelism, whose ep x etp ranks are some of dp x cp x tp."""
    ranks_per_node: int | None
    """Ranks of a node, where rows are sent within nodes and then between them."""
    microbatches: int
    """Whole micro-batches per step and data-parallel replica."""
    world: int
    """Processes of the job."""
    device: DeviceKind
    """The kind of device that processes compute on, or are planned for."""
    in_process: bool
    """All pipeline ranks share one process."""
    model: ModelSpec = field(repr=False)
    stage_layers: tuple[StageSpec, ...]
    sends_tuples: bool
    """Stages pass on more than one tensor, or one of another type than the model's."""
    scatters: bool
    """Each tensor-parallel rank sends only its share of a message that all of them have."""
    slice_lengths: tuple[int, ...]
    """Positions of each slice of a sequence; one where the schedule does not cut them."""
    loss_chunk: int
    """Most tokens whose logits exist at a time; 0: all tokens of a micro-batch."""
    split: PositionSplit
    """How positions are split over context-parallel ranks."""
    context: ContextPlans = field(repr=False)
    """How these attend to each other's positions."""
    replicas: ReplicaPolicy
    """The ZeRO stage in force, and when replicas communicate."""
    schedule: Schedule = field(repr=False)
    ramp_schedules: Mapping[int, Schedule] = field(repr=False)
    """Schedules of the batches before the final one, by their size (``train.batch_ramp``)."""
    block_policies: tuple[tuple[BlockSpan, ...], ...] = field(repr=False)
    """How the blocks of each stage keep their activations."""
    freed_by_input_grad: Fraction
    """The share of a micro-batch's activations that an I frees at least, of whole sequences
    (:mod:`megapipe.plan.freed`), where a limit of activations counts by it; 0 elsewhere."""
    is_final: bool
    """All that it depends on is known: the vocabulary, what is ``auto``, and `freed_by_input_grad`
    where it counts."""
    cost: Cost = field(repr=False)
    """Costs of each stage's operations, in FLOPs per token; messages cost nothing."""
    async_schedule: AsyncSchedule | None = field(default=None, repr=False)
    """The stream by which to train where ``pipeline.weights`` is not synchronous; then `schedule`
    is a synchronous one of the same stages and micro-batches."""

    @cached_property
    def run_schedule(self) -> Schedule:
        """The operations that run: those of a step, or of a stream as many windows as it takes to
        be steady and to run dry."""
        if self.async_schedule is None:
            return self.schedule
        windows = finite(self.async_schedule, 2 * self.async_schedule.ahead + 3)
        return replace(windows, recompute=self.schedule.recompute)

    @property
    def tied_embedding_is_linked(self) -> bool:
        """Whether a tied embedding has a bucket on the first stage, which updates it, and one on
        the last, which gets a copy; otherwise it has one that all share."""
        return self.async_schedule is not None and self.pipeline_processes > 1

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return len(self.stage_layers)

    @property
    def chunks(self) -> int:
        """Virtual stages per pipeline rank, rounded up."""
        return -(-self.stages // self.pp)

    @property
    def dp_cp(self) -> int:
        """Processes that compute with the same weights, whose gradients are added up."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Processes with the same part of what is split over ep, of any tokens."""
        return self.dp_cp * self.tp // self.ep_ranks

    @property
    def ep_sizes(self) -> tuple[int, int]:
        """ep and etp."""
        return self.ep, self.etp

    @property
    def ep_ranks(self) -> int:
        """Processes of a pipeline index that have all of what is split over ep together."""
        return self.ep * self.etp

    @property
    def max_dp(self) -> int:
        """The most processes that compute with the same weights."""
        return max_replicas(self.model, self.dp_cp, self.edp)

    @property
    def uses_attention_tiles(self) -> bool:
        """Whether positions are split, or results of attention are kept for a second run."""
        kept = any(span.policy.keeps_attention for spans in self.block_policies for span in spans)
        return self.split.cp > 1 or kept

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """Positions of each slice that a context-parallel rank holds."""
        return tuple(length // self.cp for length in self.slice_lengths)

    @property
    def local_length(self) -> int:
        """Positions of a sequence that a context-parallel rank holds."""
        return sum(self.local_lengths)

    @property
    def pipeline_processes(self) -> int:
        """Processes along the pipeline axis."""
        return 1 if self.in_process else self.pp

    def process_ranks(self, rank: int) -> Sequence[int]:
        """The pipeline ranks of the process that has `rank`."""
        return range(self.pp) if self.in_process else [rank]

    def process_stages(self, rank: int) -> Sequence[int]:
        """The stages of the process that has pipeline rank `rank`."""
        return range(self.stages) if self.in_process else self.schedule.placement.stages_of(rank)
