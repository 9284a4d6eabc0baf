"""The section `parallel` of the configuration: the mesh of processes, and communication."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.moe import EXPERTS, SPLITTABLE
from megapipe.config.section import (
    SEARCHED,
    ExpectedText,
    OnResume,
    Section,
    UserPath,
)


class ElasticLayout(Section):
    """A layout for another number of processes (``parallel.elastic_layouts``). Keys that are not
    set keep the values that they have in the configuration."""

    dp: int | None = Field(None, ge=1)
    """Value of `parallel.dp`."""
    tp: int | None = Field(None, ge=1)
    """Value of `parallel.tp`."""
    pp: int | None = Field(None, ge=1)
    """Value of `parallel.pp`."""
    cp: int | None = Field(None, ge=1)
    """Value of `parallel.cp`; 1 also resets the section `context`."""
    ep: int | None = Field(None, ge=1)
    """Value of `parallel.ep`."""
    etp: int | None = Field(None, ge=1)
    """Value of `parallel.etp`; ep and etp of 1 also reset the section `experts`."""
    ulysses: int | None = Field(None, ge=1)
    """Value of `context.ulysses`."""
    chunks: int | None = Field(None, ge=1)
    """Value of `pipeline.chunks`."""
    schedule: UserPath | None = None
    """Value of `pipeline.schedule`."""
    microbatch: int | None = Field(None, ge=1)
    """Value of `train.microbatch`."""


class ParallelConfig(Section):
    """The process mesh: pp x dp x cp x tp, tp innermost. Sizes that are auto are those of the
    fastest layout that fits, as `megapipe plan` finds it with all other keys as they are."""

    ON_RESUME = OnResume.HARMLESS

    dp: Annotated[int | None, SEARCHED] = Field(None, ge=1)
    """Number of data-parallel replicas; default: processes divided by the other sizes."""
    tp: Annotated[int, SEARCHED] = Field(1, ge=1)
    """Number of tensor-parallel ranks, over which heads, MLP and vocabulary are split."""
    pp: Annotated[int, SEARCHED] = Field(1, ge=1)
    """Number of pipeline ranks."""
    cp: Annotated[int, SEARCHED] = Field(1, ge=1)
    """Number of context-parallel ranks, over which positions are split (section context)."""
    ep: Annotated[int, SPLITTABLE, SEARCHED] = Field(1, ge=1)
    """Number of expert-parallel ranks, over which the experts of a layer are split (model.moe, or
    the experts of a class of transformers). They are consecutive among the dp x cp x tp ranks with
    one pipeline index."""
    etp: Annotated[int, EXPERTS] = Field(1, ge=1)
    """Number of expert-tensor-parallel ranks, over which the FFN hidden size of an expert is split.
    They are consecutive ranks; parallel.ep then counts groups of etp ranks."""
    elastic_layouts: Annotated[
        dict[str, ElasticLayout],
        ExpectedText("layouts by names of your own, as in parallel.elastic_layouts.half.pp=2"),
    ] = Field(default_factory=dict)
    """Layouts for other numbers of processes: parallel.elastic_layouts.NAME.pp, and for each layout
    `dp`, `tp`, `cp`, `ep`, `etp`, `ulysses`, `chunks`, `schedule`, `microbatch`. If there are fewer
    processes than the configured layout needs, for example after nodes are lost, the first layout
    that fits is used, with the same `train.global_batch`."""
    sequence_parallel: Annotated[bool, SEARCHED] = False
    """Sequence parallelism as in Megatron-LM: outside of tensor-parallel regions, activations are
    split over tp by position. With tp=auto it is auto too unless it is set."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication library; auto: nccl if every process has a GPU to itself, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto: cuda if there is one."""
    ranks_per_node: int = Field(8, ge=1)
    """Number of processes per node, for the link speeds that plans assume."""
    timeout_s: float = Field(600.0, ge=1, le=604_800)
    """Time limit of a collective or message, in seconds, at most a week; also the time limit of the
    rendezvous and its store. From the first step on, time in which all processes are suspended does
    not count, if `watchdog` is on."""
    watchdog: bool = True
    """Whether a process on each node watches for hangs. When a rank has waited for `timeout_s`, the
    watching process names the rank that the others wait for, writes all stacks to the run folder,
    and ends the job. If the watching process is gone, ranks end by themselves two seconds later.
    Until the first step it always watches, and ends the job if a rank is gone, is stopped or cannot
    be reached."""
