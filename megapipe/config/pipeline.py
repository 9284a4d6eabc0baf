"""The section `pipeline` of the configuration: stages, and the order in which they work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megapipe.config.section import (
    ExpectedText,
    OnResume,
    OptionsOf,
    OptionValue,
    Searched,
    Section,
    UserPath,
    needs,
)

STALE = needs("pipeline.weight_versions", other="synchronous")


class GroupOptions(Section):
    """Options of interleaved schedules."""

    microbatch_group_size: int | None = Field(None, ge=1)
    """Number of micro-batches that a rank passes through one model chunk before it changes to the
    next chunk, at most all of a step. Default: the number of pipeline ranks (interleaved_seq1f1b:
    enough to have a slice for every rank). Small groups are depth-first (less memory), large ones
    breadth-first. grouped_interleaved takes from half of the ranks to all."""


class WarmupOptions(Section):
    """Options of 1f1b and eager_1f1b."""

    extra_warmup: int | None = Field(None, ge=1)
    """Number of additional warm-up forwards on each rank, in micro-batches (AvgPipe, PPoPP'23).
    Default: none."""


class ReplicatedOptions(Section):
    """Options of 1f1b_rr."""

    ranks_per_stage: Annotated[
        list[Annotated[int, Field(ge=1)]] | None,
        ExpectedText("a number of ranks for each stage, as in [2, 1], or null"),
    ] = Field(None, min_length=1)
    """Number of pipeline ranks of each stage, `parallel.pp` in total: [2, 1] for 3 ranks. In a
    stage with two ranks, micro-batch k uses rank k mod 2. Default: two for the first stage and one
    for each other stage, if there are three ranks or more. With the default `pipeline.stage_layout`
    a stage with twice the ranks has twice the work."""


class ChimeraOptions(Section):
    """Options of chimera and its variants."""

    chimera_pairs: int | None = Field(None, ge=1)
    """Number of pairs of pipelines in opposite directions, each with replicas of the weights."""


class SliceOptions(Section):
    """Options of schedules that cut sequences into slices."""

    slice_overhead_tokens: float | None = Field(None, ge=0)
    """Fixed time that an operation on a slice takes in addition, however short the slice is, as the
    number of tokens that are computed in that time. With it terapipe is cut by dynamic programming
    so that its pipeline is shortest (Li et al., 2102.07988), into the best number of slices, at
    most 128, unless `pipeline.sequence_slices` is set. The plan counts it for all schedules with
    slices. `train.py --time-slices` measures it. Default: none, and slices of equal times."""


class SlicedGroupOptions(GroupOptions, SliceOptions):
    """Options of interleaved_seq1f1b."""


class GeneratorOptions(WarmupOptions, ReplicatedOptions, ChimeraOptions, SlicedGroupOptions):
    """Options of all registered schedules."""


GENERATOR_OPTIONS: Mapping[str, type[Section]] = {
    **dict.fromkeys(("interleaved_1f1b", "grouped_interleaved"), GroupOptions),
    **dict.fromkeys(("1f1b", "dapple", "pipedream_flush", "eager_1f1b"), WarmupOptions),
    "1f1b_rr": ReplicatedOptions,
    **dict.fromkeys(
        ("chimera", "chimera_forward_doubling", "chimera_backward_halving"), ChimeraOptions
    ),
    **dict.fromkeys(("seq1f1b", "terapipe"), SliceOptions),
    "interleaved_seq1f1b": SlicedGroupOptions,
}
"""Options of each registered schedule that has options."""


class PipelineConfig(Section):
    """How layers become stages, and in which order the stages work."""

    ON_RESUME = OnResume.HARMLESS

    schedule: Annotated[UserPath, Searched("planned")] = "1f1b"
    """Name of a registered schedule (`scripts/schedule.py list` shows them), your own function as
    `module:function`, or a file of operations with the ending `.csv`. auto: measure the first
    steps, search a schedule for the measured times, and continue with it. planned: the registered
    schedule, with its `chunks`, of the fastest layout that fits, as `megapipe plan` finds it."""
    placement: Annotated[
        Literal["loop", "v", "wave"] | None, needs("pipeline.schedule", "auto")
    ] = None
    """With schedule=auto: how the stages are placed on the ranks. loop: rank 0 to the last, and
    around again (default); v: from rank 0 to the last and back, 2 chunks; wave: v twice, 4 chunks.
    Other schedules have their own placement."""
    chunks: int | None = Field(None, ge=1)
    """Number of virtual stages (model chunks) per pipeline rank; default: the schedule's."""
    options: Annotated[
        dict[str, OptionValue],
        ExpectedText("options of the schedule, as in pipeline.options.extra_warmup=2"),
        OptionsOf("pipeline.schedule", GENERATOR_OPTIONS),
    ] = Field(default_factory=dict)
    """Options of `schedule`, by name: pipeline.options.NAME. A user-defined function is called with
    the options that it has as parameters."""
    sequence_slices: int | None = Field(None, ge=1)
    """Number of slices into which each sequence is cut, for schedules with slices (seq1f1b,
    terapipe, ...). Slices take equal times, by FLOPs and `slice_attention_cost`. It is optional for
    terapipe with `options.slice_overhead_tokens`."""
    slice_attention_cost: float = Field(1.0, ge=0)
    """Time per FLOP of attention to earlier tokens, relative to linear layers: 2 if attention runs
    at half their speed. `train.py --time-slices` measures it."""
    activation_limit: float | None = Field(None, gt=0)
    """Maximum activations that a pipeline rank saves, in micro-batches of all the rank's layers. A
    micro-batch counts as 1 until its input gradient is computed, and then with the fraction that
    its weight gradient still needs. Searched schedules (zb_1p, zb_2p, auto) keep the limit; other
    schedules are refused above it. Default of auto: the activations of its initial schedule."""
    weight_versions: Annotated[
        Literal[
            "synchronous",
            "stash",
            "vertical",
            "double_buffer",
            "double_group",
            "latest",
            "predict",
            "correct",
        ],
        OnResume.LISTED,
    ] = "synchronous"
    """Which weights operations read (docs/streams.md). synchronous: the newest; the pipeline
    flushes between steps. All others never flush, and read weights that are a few updates old.
    stash: the newest weights, kept for the backward (PipeDream, 1806.03377); vertical: the version
    that the first stage has read; double_buffer: the version of the previous step, in two buffers
    (PipeDream-2BW, 2006.09503), which needs at least as many micro-batches per step as the first
    rank's warm-up; double_group: the newest weights of each half of the layers, for `schedule`
    two_group (WPipe); latest: the newest weights, even if the forward has read another version
    (AMPNet, 1705.09786); predict: like latest, but a forward reads a prediction of the weights at
    its own update (SpecTrain, 1809.02839); correct: like latest, but a backward reads the newest
    weights moved back to about what its forward has read (T2 of PipeMare, 1910.05124). `schedule`
    must be 1f1b or eager_1f1b, except for double_group; stash and double_buffer also allow
    1f1b_rr."""
    prediction_horizon: Annotated[
        Literal["update", "round_trip"],
        OnResume.LISTED,
        needs("pipeline.weight_versions", "predict"),
    ] = "update"
    """With weight_versions=predict: the point in time for which weights are predicted. update: when
    the micro-batch's update window updates them; the micro-batch's backward reads the newest
    weights (PipeOptim, 2312.00839). round_trip: when the micro-batch's backward is done at the
    first stage; its backward reads predictions too (XPipe, 1911.04610)."""
    velocity_decay: Annotated[
        float | None, OnResume.LISTED, needs("pipeline.weight_versions", "correct")
    ] = Field(None, gt=0, lt=1)
    """With weight_versions=correct: decay D of the weights' velocity. Each update keeps D^(1/tau)
    of the velocity, where tau is the mean number of updates by which the weights of the stage's
    forwards are behind. Default: exp(-2), as in PipeMare."""
    lr_anneal_steps: Annotated[int | None, OnResume.LISTED, STALE] = Field(None, ge=1)
    """Steps over which the learning rate of stages that read stale weights rises to the scheduled
    one: in step t it is the scheduled one divided by tau^(1 - t / lr_anneal_steps). The staleness
    tau, at least 1, is the mean number of updates by which the stage's forwards are behind (T1 of
    PipeMare, 1910.05124). Step 0 is the first that is not synchronous. Default: none."""
    synchronous_steps: Annotated[int | None, OnResume.LISTED, STALE] = Field(None, ge=1)
    """Number of synchronous steps at the beginning, on the same stages: the pipeline flushes after
    each of them, and no weights are stale (T3 of PipeMare, 1910.05124). Default: none."""
    stage_layout: str | list[int] | None = None
    """Layers of each stage: a list of layer counts, or a string of stages divided by `|` made of E
    (embedding), L or L*n (layers) and H (head), as in "E L*3 | L*4 | L*3 H". Default: least FLOPs
    for the busiest rank, then for the slowest stage, with head and recomputation."""
    rank_order: Literal["auto"] | list[int] | None = None
    """Pipeline ranks in the order in which the schedule numbers them: with [0, 2, 1] rank 2 does
    what rank 1 would do. auto: the order whose slowest link between neighbouring stages is fastest,
    by `plan.links` and the bandwidths within and between nodes. Default: 0, 1, 2, ..."""
    transport: Literal["process_group", "in_process"] = "process_group"
    """Where pipeline ranks run. process_group: one process per pipeline rank. in_process: each
    process runs the programs of all pipeline ranks; there are dp x cp x tp processes."""
    scatter_gather: Literal["auto", "on", "off"] = "auto"
    """How hidden states that all tensor-parallel ranks have (without sequence parallelism) are sent
    to the next pipeline rank. on: each rank sends a shard, and the receivers gather the shards
    (Narayanan et al., 2104.04473); off: each rank sends everything; auto: on if the gather's links
    are faster than the pipeline's, by `parallel.ranks_per_node`, `plan.intra_node_gb_s` and
    `plan.inter_node_gb_s`. Results are bitwise equal."""
    recv_prefetch: int | None = Field(None, ge=0)
    """Number of operations by which a receive is posted before its message is needed; a channel has
    at most one posted receive. 0: a receive is posted when its message is needed. The first step,
    in which kernels are loaded, posts none early. On a GPU, MoE layers prevent early receives, and
    so does attention in tiles (`parallel.cp`, `activations.keep_attention`) that end at documents.
    Default: 1 on NCCL, where a waiting receive occupies a multiprocessor; on gloo as soon as the
    previous message has arrived."""
    p2p_max_ctas: int = Field(1, ge=1)
    """Maximum number of NCCL thread blocks (CTAs) of a channel between two pipeline ranks. Each
    occupies a multiprocessor while a message is in flight or awaited. To choose this key and
    `recv_prefetch`, compare the measured bubble that log.timeline prints with the simulated one."""
    debug: bool = False
    """Send a header with each message and check it on arrival; fill buffers with NaN before a
    receive; compare checksums of the samples that cp and tp ranks get. Under vertical and
    double_buffer the header also has the weight version that the sender has read."""

    @property
    def generator_options(self) -> GeneratorOptions:
        """Options of registered schedules; an option that is not set is None."""
        known = {k: v for k, v in self.options.items() if k in GeneratorOptions.model_fields}
        return GeneratorOptions.model_validate(known)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the schedule's generator: `chunks`, `slices` and the options; None means the
        generator's default."""
        given = {"chunks": self.chunks, "slices": self.sequence_slices, **self.options}
        given.pop("slice_overhead_tokens", None)
        return given
