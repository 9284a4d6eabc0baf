"""The configuration tree: every key, its type, its default and what it means.

Loading (YAML, command line) is in :mod:`megapipe.cli`; this module imports no torch, so a wrong
value is reported before anything heavy starts.
"""

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megapipe.config.activations import ActivationsConfig
from megapipe.config.batch_ramp import BatchRamp
from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.context import ContextConfig
from megapipe.config.data import DataConfig
from megapipe.config.experts import ExpertsConfig
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from megapipe.config.moe import EXPERTS
from megapipe.config.numbers import NumbersConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.pipeline import STALE, PipelineConfig
from megapipe.config.section import ExpectedText, Needs, OnResume, Section, UserPath, needs, one_of
from megapipe.config.update_rules import RULES
from megapipe.util.paths import LATEST
from megapipe.util.user_code import is_user_code, names_or_code
from megapipe.words import join_or

LR_SCHEDULES = ("cosine", "linear", "wsd", "constant")
USUAL_WARMUP = 100
"""Default of ``optimizer.warmup_steps`` in runs that are long enough."""


TASK, TASK_VARIABLE = "%a", "SLURM_ARRAY_TASK_ID"
"""Stands for the task of a job array in the name of its run, as in names of SLURM's files."""


def lacks_task(name: object) -> bool:
    """Whether a name has a task where there is none."""
    return isinstance(name, str) and TASK in name and TASK_VARIABLE not in os.environ


def _with_task(name: object) -> object:
    if not isinstance(name, str) or lacks_task(name):
        return name
    return name.replace(TASK, os.environ.get(TASK_VARIABLE, ""))


def _no_link(name: str) -> str:
    if name == LATEST:
        raise ValueError("the name of a link")
    return name


class RunConfig(Section):
    """Where a run lives."""

    ON_RESUME = OnResume.HARMLESS

    name: Annotated[
        str,
        BeforeValidator(_with_task),
        AfterValidator(_no_link),
        ExpectedText(
            "up to 100 letters, digits, dots, underscores and dashes; a letter or digit first; not "
            f"{LATEST}, which is a link"
        ),
    ] = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run; its folder is `folder`/`name`, and `folder`/latest a link to the run that
    was started last. In a job array of SLURM's `%a` stands for the number of the task, so that each
    has a run of its own."""
    folder: UserPath = "runs"
    """Folder that holds the runs."""
    seed: Annotated[int, OnResume.ORDER] = Field(1234, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """On CUDA: only deterministic kernels and a pinned NCCL algorithm, so that equal runs are
    bitwise equal; slower. On the CPU they always are."""
    collect_every: int = Field(100, ge=0)
    """Steps between runs of Python's garbage collector, at the same step on all ranks; 0: as Python
    has it, whenever, so that ranks wait for each other."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the run folder's newest intact checkpoint, begin if there is none at all,
    and fail if all are damaged; never: refuse a folder that has an intact one, else begin; must:
    fail if there is none that is intact."""
    resume_changes: Literal["refuse", "allow"] = "refuse"
    """Whether a run may continue with another corpus, seed, sequence length, document mask or
    model (as far as the tensors fit). Other changes, such as the learning rate, are listed."""

    own_code: Literal["allow", "refuse"] = "allow"
    """Whether values may name code to run, as `module:name` (docs/extending.md). refuse: each is an
    error before anything is imported. For a configuration from somebody else, write it on the
    command line, which wins over the file, or set MEGAPIPE_OWN_CODE=refuse, which wins over both.
    """

    def exact_on(self, device: str) -> bool:
        """Whether equal runs are bitwise equal on devices of this type."""
        return device == "cpu" or self.deterministic


DECAYS = Needs(
    f"optimizer.schedule={join_or([name for name in LR_SCHEDULES if name != 'constant'])}",
    lambda config: config.optimizer.schedule != "constant",
)
ROUNDS = (needs("optimizer.state_dtype", "bf16"), needs("optimizer.master", "none"))
FP16 = needs("model.dtype", "fp16")


class OptimizerConfig(Section):
    """Update rule, learning-rate schedule, and where optimizer state lives."""

    rule: Annotated[
        str,
        ExpectedText(f"one of {', '.join(RULES)}, or a class of your own as module:Name"),
        OnResume.NEVER,
    ] = Field("adamw", pattern=names_or_code(RULES))
    """Update rule. adamw (Loshchilov and Hutter, 1711.05101), adam (Kingma and Ba, 1412.6980), sgd
    (with momentum), lion (Chen et al., 2302.06675), muon (Jordan et al., 2024: matrices of the
    layers; everything else takes adamw), lars (You et al., 1708.03888), lamb (You et al.,
    1904.00962), rmsprop (Tieleman and Hinton, 2012), nadamw (Dozat, 2016, with decoupled decay),
    adabelief (Zhuang et al., 2010.07468), adam3 (AdaM3, ICDM 2023, by the formula of Wang et al.,
    2106.11514), or a class of your own as `module:Name` (docs/extending.md)."""
    lr: float = Field(3e-4, ge=0)
    """Peak learning rate."""
    min_lr: Annotated[float, DECAYS] = Field(3e-5, ge=0)
    """Learning rate at the end of the decay."""
    warmup_steps: Annotated[
        int | Annotated[float, Field(lt=1)] | None,
        ExpectedText(
            "a whole number of steps, a share of train.steps below 1 such as 0.02, or null"
        ),
    ] = Field(None, ge=0)
    """Steps of linear warm-up, or, written with a point, their share of `train.steps`: 1 is one
    step and 0.02 a fiftieth of the run, rounded to whole steps. Default: 100, or a tenth of a run
    that is too short for 100 and a decay. Step i, counted from 1, has lr x i / (warmup_steps + 1),
    so the first one moves and the one after the warm-up has the peak. nanoGPT and torchtitan warm
    up likewise; Megatron-LM and transformers take lr x (i - 1) / warmup_steps, which is 0 at the
    first step and at the peak at the same one."""
    schedule: Annotated[
        str,
        ExpectedText(f"one of {', '.join(LR_SCHEDULES)}, or a function of your own as module:name"),
    ] = Field("cosine", pattern=names_or_code(LR_SCHEDULES))
    """Decay after the warm-up; wsd (warm-up, stable, decay) holds the peak until the last
    `decay_steps`. Or a function of your own as `module:name` that returns the learning rate of a
    step, warm-up included (docs/extending.md)."""
    decay_steps: Annotated[int | None, DECAYS] = Field(None, ge=1)
    """Steps of the decay; default: all after the warm-up (wsd: a tenth of all steps)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the first moment (adamw, adam, lamb, nadamw, adabelief, adam3, muon's adamw);
    lion: share of the momentum in the step."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the second moment; lion: decay rate of the momentum, usually 0.99; rmsprop:
    torch's alpha, usually 0.99."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment; adabelief, adam3: added to the second moment at each
    step (adabelief: to its root too), where 1e-16 is usual."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; norms and biases have none. Decoupled, except in adam, sgd, lars
    and rmsprop, which add it to the gradient."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """sgd, lars, muon, rmsprop: decay rate of the momentum; muon's usual is 0.95."""
    momentum_decay: float = Field(4e-3, ge=0)
    """nadamw: how fast its momentum grows from beta1 / 2 to beta1: in step t it is
    beta1 x (1 - 0.96^(t x momentum_decay) / 2). 0: it stays at beta1 / 2."""
    nesterov: bool = True
    """sgd, muon: Nesterov's momentum."""
    trust_coefficient: float = Field(1e-3, gt=0)
    """lars: share of its norm that a matrix moves by, at learning rate 1."""
    muon_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """muon: factor of the learning rate of a matrix [m, n]: 0.2 sqrt(max(m, n)), which suits
    learning rates of adamw (Liu et al., 2502.16982), or sqrt(max(1, m / n))."""
    muon_split: Literal["projections", "heads", "none"] = "projections"
    """muon: what of the matrix of queries, keys and values is made orthogonal by itself, and has a
    factor of its own: projections, each of the three, as in checkpoints with q_proj, k_proj and
    v_proj; heads, each head of each; none, all of it together. A gated MLP's gate and up are always
    apart, and adapters whole."""
    adamw_lr_scale: float = Field(1.0, gt=0)
    """muon: learning rate of what takes adamw, in multiples of `lr`."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; null: no clipping."""
    clip_scope: Annotated[Literal["global", "stage"], STALE] = "global"
    """Whose norm `clip` bounds: that of all gradients, or each stage's by itself. Without a flush
    updates do not wait for the norms of others, unless `pipeline.weights` is double_buffer: so they
    are clipped by stage or not at all. A tied embedding is of the first stage. Synchronous training
    clips globally."""
    zero: Annotated[Literal[0, 1, 2, 3], OnResume.HARMLESS] = 1
    """State that is sharded over dp (ZeRO): 0 nothing, 1 master weights and optimizer state, 2 also
    gradients, 3 also the weights of stages that are not being computed. 2 and 3 save memory where a
    process has several stages (`pipeline.chunks`; `parallel.pp` may be 1). Gradients of a tied
    embedding and of stages with several holders stay whole."""
    shard_size: Annotated[int | None, OnResume.HARMLESS, needs("optimizer.zero", above=0)] = Field(
        None, ge=1
    )
    """Data-parallel replicas that share one copy of what is sharded (hybrid sharding); a divisor
    of dp, all of them by default."""
    prefetch: Annotated[int, OnResume.HARMLESS, needs("optimizer.zero", 3)] = Field(1, ge=0)
    """zero 3: stages whose weights are gathered before they are needed."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients travel between replicas; they are added in fp32. Default: the
    type of the main gradients, fp32 (fp64)."""
    reduce_chunk_mib: float | None = Field(256.0, gt=0)
    """Least size, in MiB, of the pieces in which a stage's gradients are reduced over dp. A piece
    leaves as soon as its last weight gradient of the step is in, beside those to come; the sums are
    the same bits. null: one reduction for a stage, when all is in. Stages that several ranks hold
    are not cut."""
    post_validation: Annotated[bool, OnResume.HARMLESS] = False
    """Update weights without waiting for the global gradient norm, begin the next step, and take
    the update back where the norm asks for clipping or a value is not finite: the same weights,
    bitwise, without a barrier. Takes memory for a copy of weights and state; for elementwise rules
    (all but muon, lars, lamb), zero up to 2, no offload. Holders of a tied embedding still wait for
    each other."""
    look_ahead: Annotated[
        Annotated[int, Field(ge=0)] | Literal["staleness"],
        ExpectedText("a whole number >= 0, or staleness"),
    ] = 0
    """Updates that the model is ahead of its weights (XGrad: Guan et al., 2305.18240): it computes
    losses and gradients with W - look_ahead x lr x d, d being the direction of the last update, and
    the update changes W. staleness: as many as the stage's weights are behind on average, in a
    pipeline without a flush. Validation and checkpoints have W. 0: none; fp32 and fp64 weights then
    need no copy as masters. For rules with a direction (all built-in ones but muon, lars, lamb),
    with fp32 states on the device, not for fp16, without `post_validation`."""
    master: Literal["fp32", "none"] = "fp32"
    """Master weights of a bf16 model; none: the weights are their own, updated in fp32 and rounded
    back as `rounding` says."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which optimizer state is kept between steps (fp64 models: fp32 means fp64); the
    update itself is always in that of the master weights."""
    rounding: Annotated[Literal["stochastic", "nearest"], one_of(*ROUNDS)] = "stochastic"
    """How state becomes bf16: at random in proportion to the distance, so that small changes are
    kept on average, or to the nearest value."""
    offload: Annotated[Literal["none", "host", "disk"], OnResume.HARMLESS] = "none"
    """Where optimizer state and master weights of a type of their own are: with the weights, in
    host memory, or in a memory-mapped file. A GPU's host memory is pinned, which torch does in
    powers of two: up to twice what the plan says."""
    offload_folder: Annotated[UserPath | None, OnResume.HARMLESS] = None
    """offload disk: folder of the files, best on a disk of the node's own; default: the run
    folder. The files have no name and vanish with the process."""
    window_mib: Annotated[float, OnResume.HARMLESS, one_of(*ROUNDS, needs("optimizer.offload"))] = (
        Field(64.0, ge=8)
    )
    """Most memory, in MiB, for the windows through which an update sees state that is not fp32
    beside the weights. Random numbers for stochastic rounding take 4 of it, on a GPU 32: there it
    has to be 64 at least."""
    loss_scale: Annotated[float | None, FP16] = Field(None, gt=0)
    """fp16: factor of the loss in the backward pass, best a power of two. Default: dynamic, halved
    when a gradient is not finite (the step is skipped) and doubled after `loss_scale_window` good
    steps."""
    loss_scale_window: Annotated[int, FP16, needs("optimizer.loss_scale", None)] = Field(2000, ge=1)
    """fp16: good steps after which a dynamic loss scale is doubled."""

    @property
    def own_schedule(self) -> bool:
        """Whether `schedule` is a function of the user's."""
        return is_user_code(self.schedule)

    def least_decay(self, steps: int) -> int:
        """Steps that the decay takes at the end of a run of `steps`, at the least."""
        if self.schedule == "constant":
            return 0
        if self.decay_steps is not None:
            return self.decay_steps
        if self.own_schedule:
            return 0
        return max(1, steps // 10) if self.schedule == "wsd" else 1

    def warmup(self, steps: int) -> int:
        """`warmup_steps` of a run of `steps`, as whole steps and with its default filled in."""
        if self.warmup_steps is None:
            room = max(0, steps - self.least_decay(steps))
            return USUAL_WARMUP if room >= USUAL_WARMUP else min(steps // 10, room)
        if isinstance(self.warmup_steps, float):
            return round(self.warmup_steps * steps)
        return self.warmup_steps


class KernelsConfig(Section):
    """Which kernels compute. auto takes the fastest one that can be used here and agrees with
    torch's on small data; the run's banner says which and why. One that is asked for by name and
    cannot be used is an error."""

    ON_RESUME = OnResume.HARMLESS

    attention: Literal[
        "auto", "flash", "efficient", "cudnn", "math", "flash_attn", "varlen", "flex"
    ] = "auto"
    """flash, efficient, cudnn, math: backends of torch's scaled_dot_product_attention, among which
    auto lets torch choose; flash_attn: the package flash-attn; varlen, flex: torch's kernels for
    documents of any length (see data.document_mask), of which auto takes varlen. Where
    parallel.cp or activations.keep_attention has attention go by blocks, kernels that give sums of
    exponentials: flash, efficient, cudnn, flash_attn, of which auto takes the first that can be
    used, or plain arithmetic."""
    norm: Literal["auto", "torch", "apex", "liger"] = "auto"
    """Layernorm and rmsnorm: torch's, NVIDIA apex's or Liger's."""
    rotary: Literal["auto", "torch", "inductor"] = "auto"
    """The rotation of queries and keys: torch's operations, or two kernels made by inductor, which
    takes seconds at start; auto is inductor on a GPU, here and for `swiglu` and `loss`."""
    swiglu: Literal["auto", "torch", "inductor", "liger"] = "auto"
    """The gate of a swiglu MLP: torch's, inductor's or Liger's."""
    loss: Literal["auto", "torch", "inductor"] = "auto"
    """Kernels of a loss in chunks (`loss_chunk`) between its GEMMs: torch's operations, or two
    kernels made by inductor, which take logits as they are, without a copy in fp32."""
    weight_grad: Literal["auto", "torch", "fused", "apex"] = "auto"
    """Weight gradients in bf16 and fp16 on a GPU: torch's GEMM and a sum into the fp32 main
    gradient (torch), or both at once by torch (fused) or NVIDIA apex."""
    experts: Literal["auto", "loop", "grouped"] = "auto"
    """Products of experts in F and I: one after the other (loop), or all in one kernel of torch
    (grouped), which is auto on a GPU in bf16. W adds the gradients of each expert by `weight_grad`,
    which keeps them in fp32."""
    expert_rows: Literal["auto", "torch", "inductor"] = "auto"
    """Work on the rows of experts around these products, the activation times the weight of the
    choice and the sums of a token's rows: torch's operations, or a kernel or two each, made by
    inductor, which takes seconds at start; auto is inductor on a GPU."""
    optimizer: Literal["auto", "torch", "apex"] = "auto"
    """The update of adamw and adam: torch's fused kernel or NVIDIA apex's."""
    compile: bool = False
    """Compile the blocks by torch.compile, into one graph that all of them share. It is made, and
    compared with an uncompiled block, before the first step, which takes up to a minute. Norms,
    activation functions and sums become fewer kernels, so `norm` and `swiglu` are torch's, and
    attention is one of torch's backends. Weight gradients still wait for W. What a block keeps for
    its backward is up to the compiler (activations.policy is keep, full or stage), and a forward
    that is run again agrees with the first to rounding. Not with dropout or slices of sequences."""
    loss_chunk: int | None = Field(None, ge=0)
    """Tokens whose logits there are at a time, at most half of a micro-batch's where that is 128 or
    more; their losses and all gradients are computed at once in the backward, so that the head's
    weight gradient is part of I. 0: the logits of the whole micro-batch, kept from F to I, and the
    head's weight gradient is left to W. Default: 256, on a GPU 4096."""

    overlap: bool = True
    """Tensor-parallel collectives of B and W travel while weight gradients are computed. false:
    each is waited for where it begins, and gives the same bits. Hiding them takes, with sequence
    parallelism, a gathered tensor [s, b, h] more at a time."""

    def loss_tokens(self, *, cuda: bool) -> int:
        """`loss_chunk`, with its default filled in.

        On the CPU small enough for the cache. A GPU adds each chunk's weight gradient to the main
        gradient at the speed of its memory, which many tokens have to outweigh.
        """
        if self.loss_chunk is not None:
            return self.loss_chunk
        return 4096 if cuda else 256


class TrainConfig(Section):
    """Length of the run and sizes of its batches."""

    steps: int = Field(300, ge=1, le=10**9)
    """Optimizer steps in all: the horizon of the learning rate."""
    stop_after: Annotated[int | None, OnResume.HARMLESS] = Field(None, ge=1)
    """Step after which the run is saved and ends, with everything planned for `steps` as before: a
    prefix of the longer run, which goes on from there when this is raised or null."""
    sequence_length: Annotated[int, OnResume.ORDER] = Field(256, ge=1)
    """Tokens per sample."""
    global_batch: int = Field(32, ge=1)
    """Samples per step over all replicas."""
    batch_ramp: Annotated[
        list[Annotated[int, Field(ge=1)]] | None,
        ExpectedText("start, increment and samples, as in [16, 8, 300000], or null"),
    ] = Field(None, min_length=3, max_length=3)
    """Grow the batch: [start, increment, samples] begins with `start` samples per step and adds
    `increment` after equal shares of the first `samples` samples, until `global_batch` is reached.
    Each size is a legal batch of its own: a multiple of microbatch x dp that the schedule takes.
    Default: `global_batch` from the first step on."""
    microbatch: Annotated[int, OnResume.HARMLESS] = Field(4, ge=1)
    """Samples per micro-batch; global_batch / (microbatch x dp) micro-batches make a step."""
    loss: Annotated[str | None, OnResume.REFUSED] = None
    """A loss of your own: `module:name` of a function (logits [b, s, V], labels [b, s], mask
    [b, s]) -> the sum of the unmasked tokens' losses; the logits are whatever the last layer of a
    `model.source` returns. Default: cross-entropy. It needs all logits at once
    (kernels.loss_chunk), and parallel.tp=1."""
    validate_every: Annotated[int, OnResume.HARMLESS] = Field(100, ge=0)
    """Steps between validations; 0: only at the end."""
    validation_samples: Annotated[int | None, OnResume.HARMLESS] = Field(256, ge=1)
    """Held-out samples per validation; null: all of them."""

    @property
    def batches(self) -> BatchRamp:
        """The global batch of each step."""
        return BatchRamp(self.global_batch, self.batch_ramp)

    @property
    def samples(self) -> int:
        """Samples of the whole run."""
        return self.batches.after(0, self.steps)

    @property
    def last_step(self) -> int:
        """The step, counted from 1, after which this start of the run ends."""
        return self.steps if self.stop_after is None else self.stop_after


MAY_HAVE_EXPERTS = Needs(
    EXPERTS.words, lambda config: EXPERTS.is_met(config) or config.model.source is not None
)
"""Experts of the built-in model, or a user-defined model, which may have some too."""


class LogConfig(Section):
    """Where numbers go; the console and log.jsonl in the run folder are always on."""

    ON_RESUME = OnResume.HARMLESS

    every: int = Field(1, ge=1)
    """Steps between console lines (log.jsonl has every step)."""
    tensorboard: bool = False
    """Write tensorboard events into the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline needs no account. The key comes from the environment only."""
    wandb_project: Annotated[str, needs("log.wandb", "online", "offline")] = "megapipe"
    """Project name in Weights & Biases."""
    timeline: list[int] = Field(default_factory=list)
    """Steps, counted from 1, of which the time of each pipeline operation is recorded: a trace
    for ui.perfetto.dev and a picture, each with the simulation next to it, go to
    `timeline/` in the run folder. Steps that the run does not come to are left out with a note.
    Without a flush (pipeline.weights) the steps beside each are recorded too."""
    experts_every: Annotated[int, MAY_HAVE_EXPERTS] = Field(100, ge=0)
    """Steps after which log.jsonl has how often each expert of each layer was chosen, as it has of
    the last step; `megapipe experts show` draws it. 0: never."""
    samples: bool = False
    """Write which samples each step takes to `samples/` in the run folder;
    `python -m megapipe.observe.samples FOLDER` checks that each was taken once, over any number of
    starts. A step that a kill has cut off is called unfinished; the next start does it again."""
    stragglers_every: int = Field(20, ge=0)
    """Steps after which all ranks are compared by the time that they compute themselves, as medians
    over these steps: one that takes longer than others is named on the console. 0: never."""
    profile: list[int] = Field(default_factory=list)
    """Steps, counted from 1, of which torch's profiler writes a trace per rank to `profile/` in the
    run folder, with the names of the pipeline's operations; `python -m megapipe.observe.profile
    FOLDER` joins those of a step. On a GPU the operations are NVTX ranges too. Such a step is
    slower."""
    memory_history: bool = False
    """On a GPU: remember where memory was asked for, for the snapshot that is written when there is
    no more (`out_of_memory/` in the run folder). Every allocation takes longer."""
    device: str | None = None
    """Device that --dry-run plans for, as torch calls it or a part of that (H100, A100-SXM4-80GB);
    default: that of this machine. A run reports on the one it has."""
    device_gb: float | None = Field(None, gt=0)
    """Memory that a process may take, in GB (10^9 bytes), for the plan; default: known for common
    GPUs. CUDA, NCCL and fragmentation take some too: leave a few GB."""
    peak_tflops: float | None = Field(None, gt=0)
    """Dense peak of one device for the MFU; default: known for common GPUs, else no MFU."""
    efficiency: float = Field(0.6, gt=0, le=1)
    """Share of the peak at which the plan takes stages to compute: an assumption, to be replaced by
    what a run on one device reaches."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    context: ContextConfig = ContextConfig()
    experts: ExpertsConfig = ExpertsConfig()
    pipeline: PipelineConfig = PipelineConfig()
    activations: ActivationsConfig = ActivationsConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    kernels: KernelsConfig = KernelsConfig()
    train: TrainConfig = TrainConfig()
    numbers: NumbersConfig = NumbersConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @property
    def resets_positions(self) -> bool:
        """Whether tokens are given positions in their own documents: where those are learned, as
        others are distances."""
        learned = self.model.source is None and self.model.positions == "learned"
        return learned and self.data.resets_positions

    def loss_tokens(self, *, cuda: bool) -> int:
        """Most tokens whose logits there are at a time; 0: all, as a loss or a model of the user's
        needs."""
        own = self.train.loss is not None or self.model.source is not None
        return 0 if own else self.kernels.loss_tokens(cuda=cuda)
