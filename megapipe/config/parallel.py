"""The section `parallel` of the configuration: the mesh of processes, and how they communicate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.moe import EXPERTS
from megapipe.config.section import ExpectedText, OnResume, Section, UserPath


class OtherLayout(Section):
    """A layout for another number of processes; what it leaves open is as without it."""

    dp: int | None = Field(None, ge=1)
    """As `parallel.dp`."""
    tp: int | None = Field(None, ge=1)
    """As `parallel.tp`."""
    pp: int | None = Field(None, ge=1)
    """As `parallel.pp`."""
    cp: int | None = Field(None, ge=1)
    """As `parallel.cp`; 1 leaves nothing of the section `context`."""
    ep: int | None = Field(None, ge=1)
    """As `parallel.ep`."""
    etp: int | None = Field(None, ge=1)
    """As `parallel.etp`; with both 1 nothing is left of the section `experts`."""
    ulysses: int | None = Field(None, ge=1)
    """As `context.ulysses`."""
    chunks: int | None = Field(None, ge=1)
    """As `pipeline.chunks`."""
    schedule: UserPath | None = None
    """As `pipeline.schedule`."""
    microbatch: int | None = Field(None, ge=1)
    """As `train.microbatch`."""


class ParallelConfig(Section):
    """The process mesh: pp x dp x cp x tp, tp innermost."""

    ON_RESUME = OnResume.HARMLESS

    dp: int | None = Field(None, ge=1)
    """Data-parallel replicas; default: what the number of processes leaves."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks: heads, MLP and vocabulary are split over them."""
    pp: int = Field(1, ge=1)
    """Pipeline ranks."""
    cp: int = Field(1, ge=1)
    """Context-parallel ranks: positions of each sequence are split over them (section context)."""
    ep: Annotated[int, EXPERTS] = Field(1, ge=1)
    """Expert-parallel ranks, over which the experts of a layer are split (model.moe): neighbours
    among the dp x cp x tp ranks of a pipeline index."""
    etp: Annotated[int, EXPERTS] = Field(1, ge=1)
    """Ranks over which the inner width of an expert is split, neighbours among these: parallel.ep
    then counts groups of so many."""
    layouts: Annotated[
        dict[str, OtherLayout],
        ExpectedText("layouts by names of your own, as in parallel.layouts.half.pp=2"),
    ] = Field(default_factory=dict)
    """Layouts for other numbers of processes: parallel.layouts.NAME.pp, and of each `dp`, `tp`,
    `cp`, `ep`, `etp`, `ulysses`, `chunks`, `schedule`, `microbatch`. Where there are not as many
    processes as the keys above want, as when nodes are lost, the first of these that fits is taken,
    with the same `train.global_batch`."""
    sequence_parallel: bool = False
    """Keep activations between the tensor-parallel regions split by sequence over tp."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication library; auto: nccl when every process has a GPU of its own, by the GPUs'
    identities, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda if there is one."""
    per_node: int = Field(8, ge=1)
    """Processes per node, for what the plan makes of link speeds."""
    node_gb_s: float = Field(300.0, gt=0)
    """GB/s that a process sends to others of its node; as over NVLink."""
    network_gb_s: float = Field(25.0, gt=0)
    """GB/s that a process sends to other nodes; as over a port of 200 Gbit/s."""
    latency_us: float = Field(20.0, ge=0)
    """Microseconds that an exchange of nothing takes, for what plans and `experts.chunks=auto` make
    of rows on their way to experts: it is what chunks cost."""
    timeout_s: float = Field(600.0, ge=1, le=604_800)
    """Seconds after which a collective or a message that no peer answers is an error, at most a
    week; also for the meeting of the processes, and for the store in which they meet. Time in which
    all processes are suspended does not count from the first step on, if `watchdog` is on."""
    watchdog: bool = True
    """Whether a process of each node looks for ranks that hang. It names the one that the others
    wait for, writes the stacks of all into the run folder, and ends the job, when a rank has waited
    for `timeout_s`; where that process is gone, ranks end by themselves two seconds later. Before
    the first step it always looks, and ends the job where a rank is gone, is stopped or cannot be
    reached."""
