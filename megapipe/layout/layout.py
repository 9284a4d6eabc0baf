"""The resolved layout: mesh sizes, stages, schedule, and what else depends on several keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from megapipe.context.split import PositionSplit
from megapipe.layers.activation_policy import BlockSpan
from megapipe.layout.context_plan import ContextPlans
from megapipe.layout.zero_stage import max_replicas
from megapipe.model.interface import ModelSpec
from megapipe.model.partition import StageSpec
from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, finite
from megapipe.schedule.cost import Cost
from megapipe.schedule.data_parallel import ReplicaPolicy
from megapipe.schedule.ir import Schedule

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
    """Size of expert tensor parallelism. The ep x etp ranks that share the experts of a layer are
    some of the dp x cp x tp ranks."""
    ranks_per_node: int | None
    """Number of ranks per node, for hierarchical dispatch; None for other dispatch modes."""
    microbatches: int
    """Number of whole micro-batches per step and data-parallel replica."""
    world: int
    """Number of processes of the job."""
    device: DeviceKind
    """Kind of device that processes compute on, or that the plan assumes."""
    in_process: bool
    """Whether all pipeline ranks share one process."""
    model: ModelSpec = field(repr=False)
    stage_layers: tuple[StageSpec, ...]
    sends_tuples: bool
    """Whether stages send tuples of tensors, or a type other than the model's."""
    scatters: bool
    """Whether each tensor-parallel rank sends a shard of the hidden states to the next stage,
    instead of all of them (scatter-gather)."""
    slice_lengths: tuple[int, ...]
    """Number of positions of each slice; a single number if sequences are not cut."""
    loss_chunk: int
    """Maximum number of tokens whose logits exist at a time; 0: all tokens of a micro-batch."""
    split: PositionSplit
    """Distribution of positions over context-parallel ranks."""
    context: ContextPlans = field(repr=False)
    """Ring plans of context-parallel attention, forward and backward."""
    replicas: ReplicaPolicy
    """ZeRO stage in force, and when data-parallel replicas communicate."""
    schedule: Schedule = field(repr=False)
    ramp_schedules: Mapping[int, Schedule] = field(repr=False)
    """Schedules for the smaller batches of ``train.batch_ramp``, by batch size."""
    block_policies: tuple[tuple[BlockSpan, ...], ...] = field(repr=False)
    """For each stage, spans of consecutive blocks with one policy: what the blocks recompute,
    offload and save."""
    freed_by_input_grad: Fraction
    """Smallest fraction of a micro-batch's activations that an I frees, for uncut sequences
    (:mod:`megapipe.plan.activation_split`); 0 if no activation limit or schedule needs it."""
    is_final: bool
    """Whether nothing is left to resolve: the vocabulary size is known, no key is ``auto``, and
    `freed_by_input_grad` is measured if needed."""
    cost: Cost = field(repr=False)
    """Costs of each stage's operations, in FLOPs per token; messages cost nothing."""
    async_schedule: AsyncSchedule | None = field(default=None, repr=False)
    """No-flush schedule of the run, if ``pipeline.weight_versions`` is not synchronous. `schedule`
    is then a synchronous schedule with the same stages and micro-batches."""

    @cached_property
    def run_schedule(self) -> Schedule:
        """Schedule of one step. For a no-flush schedule: of as many update windows as it takes to
        reach the steady state and to drain."""
        if self.async_schedule is None:
            return self.schedule
        windows = finite(self.async_schedule, 2 * self.async_schedule.ahead + 3)
        return replace(windows, recompute=self.schedule.recompute)

    @property
    def tied_embedding_is_linked(self) -> bool:
        """Whether a tied embedding has two buckets: one on the first stage, which updates the
        weights, and one on the last stage, which receives them. Otherwise all holders of the
        embedding share one bucket."""
        return self.async_schedule is not None and self.pipeline_processes > 1

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return len(self.stage_layers)

    @property
    def chunks(self) -> int:
        """Number of virtual stages per pipeline rank, rounded up."""
        return -(-self.stages // self.pp)

    @property
    def dp_cp(self) -> int:
        """Number of processes that share weights and sum their gradients: dp x cp."""
        return self.dp * self.cp

    @property
    def edp(self) -> int:
        """Number of processes that hold the same experts, or the same parts of them with etp
        (expert data parallelism)."""
        return self.dp_cp * self.tp // self.ep_ranks

    @property
    def ep_sizes(self) -> tuple[int, int]:
        """Sizes of expert parallelism and expert tensor parallelism: (ep, etp)."""
        return self.ep, self.etp

    @property
    def ep_ranks(self) -> int:
        """Number of processes over which the experts of a layer are split: ep x etp."""
        return self.ep * self.etp

    @property
    def max_dp(self) -> int:
        """Number of processes that hold equal weights: `dp_cp`, or for experts `edp` if it is
        more."""
        return max_replicas(self.model, self.dp_cp, self.edp)

    @property
    def uses_attention_tiles(self) -> bool:
        """Whether attention runs in tiles: with cp, or if recomputed blocks save its results."""
        kept = any(span.policy.saves_attention for spans in self.block_policies for span in spans)
        return self.split.cp > 1 or kept

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """Number of positions of each slice on one context-parallel rank."""
        return tuple(length // self.cp for length in self.slice_lengths)

    @property
    def local_length(self) -> int:
        """Number of positions of a sequence on one context-parallel rank."""
        return sum(self.local_lengths)

    @property
    def pipeline_processes(self) -> int:
        """Number of processes along the pipeline axis; 1 if pipeline ranks share a process."""
        return 1 if self.in_process else self.pp

    def process_ranks(self, rank: int) -> Sequence[int]:
        """Return all pipeline ranks of the process with pipeline rank `rank`."""
        return range(self.pp) if self.in_process else [rank]

    def process_stages(self, rank: int) -> Sequence[int]:
        """Return all stages of the process with pipeline rank `rank`."""
        return range(self.stages) if self.in_process else self.schedule.placement.stages_of(rank)
