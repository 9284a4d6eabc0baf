"""The section `pipeline` of the configuration: stages, and the order in which they work."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.section import ExpectedText, OnResume, Section, UserPath, needs

STALE = needs("pipeline.weights", other="synchronous")


class PipelineConfig(Section):
    """How the layers become stages, and the order in which the stages work."""

    ON_RESUME = OnResume.HARMLESS

    schedule: UserPath = "1f1b"
    """Name of a registered schedule (`scripts/schedule.py list` shows them), a function of your
    own as `module:function`, or a file of operations that ends in `.csv`; auto: measure the first
    steps, search for what they cost, and go on with what was found."""
    placement: Annotated[
        Literal["loop", "v", "wave"] | None, needs("pipeline.schedule", "auto")
    ] = None
    """For schedule auto: stages around the ranks (loop, the default), down and back up (v, 2
    chunks), or that twice (wave, 4). Other schedules have their own."""
    chunks: int | None = Field(None, ge=1)
    """Virtual stages (model chunks) per pipeline rank; default: the schedule's own."""
    group: int | None = Field(None, ge=1)
    """interleaved_1f1b: micro-batches per group, from 1 to all; default: as many as pipeline
    ranks. Small groups are depth-first (less memory), large ones breadth-first.
    grouped_interleaved: from half of the ranks to all."""
    slices: int | None = Field(None, ge=1)
    """Parts into which each sequence is cut, for the schedules that do (seq1f1b, terapipe, ...);
    the parts take equal times, by their FLOPs and `slice_attention`. terapipe with `slice_overhead`
    may leave it open."""
    slice_overhead: float | None = Field(None, ge=0)
    """Time that an operation on a part takes however short it is, in tokens: as long as so many of
    them take by themselves. With it terapipe is cut so that its pipeline is shortest, by dynamic
    programming (Li et al., 2102.07988), and in as many parts as are best, at most 128, unless
    `slices` says how many. The plan counts it for all schedules that cut. `train.py
    --time-slices` measures it. Default: none, and parts of equal times."""
    slice_attention: float = Field(1.0, ge=0)
    """Time of a FLOP of attention to the tokens before, in that of one of the linear layers: 2
    where attention runs at half of their speed. `train.py --time-slices` measures it."""
    pairs: int | None = Field(None, ge=1)
    """chimera: pairs of pipelines in opposite directions, each with its copies of the weights."""
    replicas: Annotated[
        list[Annotated[int, Field(ge=1)]] | None,
        ExpectedText("a number of ranks for each stage, as in [2, 1], or null"),
    ] = Field(None, min_length=1)
    """1f1b_rr: how many of the `parallel.pp` ranks each stage has, as in [2, 1] for 3; micro-batch
    k takes rank k mod 2 of the first. Default: two for the first stage and one for each other, as
    far as there are three ranks or more. The default `layout` gives a stage with twice the ranks
    twice the work."""
    advance: int | None = Field(None, ge=1)
    """1f1b, eager_1f1b: micro-batches by which the forwards of each rank are further ahead of its
    backwards (AvgPipe, PPoPP'23). Default: none."""
    memory_limit: float | None = Field(None, gt=0)
    """Most activations of a pipeline rank, in micro-batches of all its layers. Each counts as one
    until its input gradient, then as the part of it that its weight gradient still needs. Searched
    schedules (zb_1p, zb_2p, auto) keep to it, others are refused above it. Default of auto: what
    the schedule that it begins with holds."""
    weights: Annotated[
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
    """Which weights operations read (docs/streams.md). synchronous: those after the last update,
    with an empty pipeline between steps. The others never flush, and read weights that are some
    updates old: stash the newest, kept for the backward (PipeDream, 1806.03377); vertical those
    that the first stage has read; double_buffer those of the step before, in two buffers
    (PipeDream-2BW, 2006.09503), which takes steps of as many micro-batches as the first rank is
    ahead; double_group the newest of each half of the layers, for `schedule` two_group (WPipe);
    latest whatever is newest, also if the forward has read another version (AMPNet, 1705.09786);
    predict as latest, but a forward reads what its own update is expected to find (SpecTrain,
    1809.02839); correct as latest, but a backward reads the newest moved back to about what its
    forward has read (T2 of PipeMare, 1910.05124). `schedule` is 1f1b or eager_1f1b, but for
    double_group, or 1f1b_rr for stash and double_buffer."""
    horizon: Annotated[
        Literal["update", "round_trip"], OnResume.LISTED, needs("pipeline.weights", "predict")
    ] = "update"
    """predict: up to when weights are predicted. update: to the update by the micro-batch's own
    window, and a backward reads the newest (PipeOptim, 2312.00839); round_trip: to when the
    micro-batch is through at the first stage, also for its backward (XPipe, 1911.04610)."""
    correction: Annotated[float | None, OnResume.LISTED, needs("pipeline.weights", "correct")] = (
        Field(None, gt=0, lt=1)
    )
    """correct: D, by which the velocity of weights forgets: in each update it keeps D^(1/tau) of
    what it was, tau being the mean number of updates that the stage's forwards are behind. Default:
    exp(-2), as in PipeMare."""
    lr_anneal_steps: Annotated[int | None, OnResume.LISTED, STALE] = Field(None, ge=1)
    """Steps over which the learning rate of stages that read stale weights rises to the common one:
    in step t it is divided by tau^(1 - t / lr_anneal_steps), tau being the mean number of updates
    that the stage's forwards are behind, if above 1 (T1 of PipeMare, 1910.05124). Steps are counted
    from the first one that is not synchronous. Default: none."""
    synchronous_steps: Annotated[int | None, OnResume.LISTED, STALE] = Field(None, ge=1)
    """Steps at the beginning that are synchronous, on the same stages: the pipeline runs dry in
    each, and is never filled with stale weights before they are over (T3 of PipeMare, 1910.05124).
    Default: none."""
    layout: str | list[int] | None = None
    """Which layers each stage holds: a list of layer counts, or a string of stages divided by
    `|` made of E (embedding), L or L*n (layers) and H (head), as in "E L*3 | L*4 | L*3 H";
    default: the least FLOPs for the busiest rank, then for the slowest stage, head and what is run
    again included."""
    channels: Literal["process_group", "in_process"] = "process_group"
    """process_group: one process per pipeline rank; in_process: each process runs all pipeline
    ranks' programs itself, so the number of processes is dp x cp x tp."""
    scatter_gather: Literal["auto", "on", "off"] = "auto"
    """Without sequence parallelism all tensor-parallel ranks have the same hidden states. on: each
    sends its share of them to the next pipeline rank, where the shares are gathered (Narayanan et
    al., 2104.04473); off: each sends all of them; auto: on where the gather's links are faster
    than the pipeline's, by `parallel.per_node`, `node_gb_s` and `network_gb_s`. Same bits."""
    receive_ahead: int | None = Field(None, ge=0)
    """Operations before the one that needs a message at which its receive is posted, one at a time
    on each channel; 0: when it is needed. The first step, in which kernels are loaded, posts none
    ahead, and on a GPU none does where layers have experts, or attention goes by blocks
    (`parallel.cp`, `activations.keep_attention`) that end at documents. Default: 1 on NCCL, where a
    receive that waits occupies a multiprocessor; on gloo as soon as the message before has arrived.
    """
    channel_ctas: int = Field(1, ge=1)
    """On NCCL: most thread blocks of a channel between two pipeline ranks, each on a
    multiprocessor of its own while a message is under way or awaited. How many pay, and how far
    ahead to receive, log.timeline tells: it prints the bubble as measured beside the simulated."""
    debug: bool = False
    """Send a header with each message and check it on arrival; fill buffers with NaN before a
    receive; compare checksums of the samples that ranks of cp and of tp are given. Under vertical
    and double_buffer the header has the version of the weights that were read, too."""
