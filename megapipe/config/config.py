"""The configuration tree: every key, its type, its default and its meaning.

:mod:`megapipe.cli` loads YAML and command lines. This module imports no torch, so a wrong value is
reported before anything heavy starts.
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
from megapipe.config.health import HealthConfig
from megapipe.config.kernels import OPTIONAL_KERNELS, OnlyKernels
from megapipe.config.lora import LoraConfig
from megapipe.config.model import ModelConfig
from megapipe.config.moe import EXPERTS
from megapipe.config.parallel import ParallelConfig
from megapipe.config.pipeline import STALE, PipelineConfig
from megapipe.config.plan import PlanConfig
from megapipe.config.section import (
    SEARCHED,
    ExpectedText,
    Needs,
    OnResume,
    OptionsOf,
    OptionValue,
    Section,
    UserPath,
    needs,
    one_of,
)
from megapipe.config.update_rules import RULES, RuleOptions, declaration
from megapipe.text import join_or
from megapipe.util.paths import LATEST
from megapipe.util.user_code import is_user_code, names_or_code

LR_SCHEDULES = ("cosine", "linear", "wsd", "constant")
USUAL_WARMUP = 100
"""Default of ``optimizer.warmup_steps`` in runs that are long enough for it."""


TASK, TASK_VARIABLE = "%a", "SLURM_ARRAY_TASK_ID"
"""Placeholder in ``run.name`` for the task of a job array, and the variable with its number."""


def lacks_task(name: object) -> bool:
    """Whether `name` contains :data:`TASK` although this process is not in a SLURM job array."""
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
    """Name, folder and general behaviour of a run."""

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
    """Name of the run. Its folder is `folder`/`name`, and `folder`/latest is a link to the run that
    was started most recently. In a SLURM job array `%a` stands for the number of the task, so that
    each task has a separate run."""
    folder: UserPath = "runs"
    """Folder that holds the runs."""
    seed: Annotated[int, OnResume.ORDER] = Field(1234, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """On CUDA: use only deterministic kernels and a pinned NCCL algorithm, so that equal runs are
    bitwise equal; slower. On the CPU equal runs are always bitwise equal."""
    gc_interval: int = Field(100, ge=0)
    """Steps between Python's garbage collections, which all ranks do at the same step; 0: each rank
    collects whenever Python decides, while the other ranks wait for it."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Whether to resume from the run folder's newest intact checkpoint. auto: resume, or begin anew
    if there is no checkpoint at all; fail if all are damaged. never: begin anew, but fail if there
    is an intact checkpoint. must: resume, or fail."""
    resume_changes: Literal["refuse", "allow"] = "refuse"
    """Whether a resumed run may have another corpus, seed, sequence length, document mask or model
    (as far as the tensors fit). Other changes, as of the learning rate, are only printed."""

    user_code: Literal["allow", "refuse"] = "allow"
    """Whether values of the form `module:name`, which name code to run, are allowed
    (docs/extending.md). refuse: each is an error before any import. For somebody else's
    configuration, set it on the command line, which overrides the file, or
    MEGAPIPE_USER_CODE=refuse, which overrides both."""

    def exact_on(self, device: str) -> bool:
        """Whether equal runs are bitwise equal on a device of this type."""
        return device == "cpu" or self.deterministic


DECAYS = Needs(
    f"optimizer.schedule={join_or([name for name in LR_SCHEDULES if name != 'constant'])}",
    lambda config: config.optimizer.schedule != "constant",
)
ROUNDS = (needs("optimizer.state_dtype", "bf16"), needs("optimizer.master_weights", "none"))
FP16 = needs("model.dtype", "fp16")


class OptimizerConfig(Section):
    """Update rule, learning-rate schedule, and storage of optimizer state."""

    rule: Annotated[
        str,
        ExpectedText(f"one of {', '.join(RULES)}, or a class of your own as module:Name"),
        OnResume.NEVER,
    ] = Field("adamw", pattern=names_or_code(RULES))
    """Update rule. adamw (Loshchilov and Hutter, 1711.05101), adam (Kingma and Ba, 1412.6980), sgd
    (with momentum), lion (Chen et al., 2302.06675), muon (Jordan et al., 2024: matrices of the
    layers; everything else takes adamw), lars (You et al., 1708.03888), lamb (You et al.,
    1904.00962), rmsprop (Tieleman and Hinton, 2012), nadamw (Dozat, 2016, with decoupled decay),
    adabelief (Zhuang et al., 2010.07468), adam3 (AdaM3, ICDM 2023, with the formula of Wang et al.,
    2106.11514), or your own class as `module:Name` (docs/extending.md)."""
    options: Annotated[
        dict[str, OptionValue],
        ExpectedText("options of the rule, as in optimizer.options.betas=[0.9,0.99]"),
        OptionsOf("optimizer.rule", {name: rule.options for name, rule in RULES.items()}),
    ] = Field(default_factory=dict)
    """Options of `rule`, by name: optimizer.options.NAME. Your own class may have some too."""
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
    """Steps of linear warm-up, or, written with a decimal point, a fraction of `train.steps`: 1 is
    one step, and 0.02 is 2% of the run, rounded to whole steps. Default: 100, or a tenth of a run
    that is too short for 100 steps and a decay. Step i, counted from 1, has lr x i / (warmup_steps
    + 1), so the first step has an effect and the step after the warm-up has the peak, as in nanoGPT
    and torchtitan. Megatron-LM and transformers use lr x (i - 1) / warmup_steps: 0 at the first
    step, and the peak at the same step."""
    schedule: Annotated[
        str,
        ExpectedText(f"one of {', '.join(LR_SCHEDULES)}, or a function of your own as module:name"),
    ] = Field("cosine", pattern=names_or_code(LR_SCHEDULES))
    """Shape of the decay after the warm-up. wsd (warm-up, stable, decay) holds the peak until the
    final `decay_steps`. Or your own function as `module:name`, which returns the learning rate of a
    step, also during the warm-up (docs/extending.md)."""
    decay_steps: Annotated[int | None, DECAYS] = Field(None, ge=1)
    """Steps of the decay; default: all steps after the warm-up (wsd: a tenth of all steps)."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices; norms and biases have none. It is decoupled, except in adam, sgd,
    lars and rmsprop, which add it to the gradient."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradient norm above which gradients are clipped; null: no clipping."""
    clip_scope: Annotated[Literal["global", "stage"], STALE] = "global"
    """Which gradients are in the norm that `max_grad_norm` limits: all gradients (global), or each
    stage's gradients in a norm of their own (stage). In a no-flush schedule stages do not wait for
    each other's norms, so gradients are clipped by stage or not at all, except with
    `pipeline.weight_versions=double_buffer`. A tied embedding belongs to the first stage.
    Synchronous training clips globally."""
    zero: Annotated[Literal[0, 1, 2, 3], OnResume.HARMLESS] = 1
    """ZeRO stage: state that is sharded over dp. 0: nothing; 1: master weights and optimizer state;
    2: also gradients; 3: also the weights of stages that are not being computed. 2 and 3 save
    memory only if a process has several stages (`pipeline.chunks`; `parallel.pp` may be 1).
    Gradients of a tied embedding and of stages with several holders are not sharded."""
    shard_group_size: Annotated[int | None, OnResume.HARMLESS, needs("optimizer.zero", above=0)] = (
        Field(None, ge=1)
    )
    """Number of data-parallel replicas over which state is sharded (hybrid sharding), a divisor of
    dp; default: all replicas."""
    weight_prefetch: Annotated[int, OnResume.HARMLESS, needs("optimizer.zero", 3)] = Field(1, ge=0)
    """With zero=3: number of stages whose weights are all-gathered ahead of their use."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Type in which gradients are sent between replicas; they are summed in fp32. Default: the type
    of main gradients, fp32 (fp64 for fp64 models)."""
    bucket_mib: float | None = Field(256.0, gt=0)
    """Minimum size, in MiB, of the buckets in which a stage's gradients are reduced over dp. The
    reduction of a bucket starts once its last weight gradient of the step is complete, and overlaps
    with later weight gradients; sums are bitwise equal for every size. null: one reduction per
    stage, once all its gradients are complete. Stages that several ranks hold have one bucket."""
    post_validation: Annotated[bool, OnResume.HARMLESS] = False
    """Update weights without waiting for the global gradient norm, begin the next step, and restore
    the old state if the norm asks for clipping or a value is not finite. The weights are bitwise
    the same, without a barrier. It takes memory for a snapshot of weights and state, and needs an
    elementwise rule (all except muon, lars, lamb), zero up to 2, and no offload. Holders of a tied
    embedding still wait for each other."""
    weight_prediction: Annotated[
        Annotated[int, Field(ge=0)] | Literal["staleness"],
        ExpectedText("a whole number >= 0, or staleness"),
    ] = 0
    """Number of updates by which weights are predicted (XGrad: Guan et al., 2305.18240). Losses and
    gradients are computed with W - weight_prediction x lr x d, where d is the direction of the last
    update; the update changes W. staleness: in a no-flush schedule, the mean number of updates by
    which the stage's weights are behind. Validation and checkpoints use W. 0: none; fp32 and fp64
    weights then need no separate masters. Needs a rule with a direction (all built-in ones except
    muon, lars, lamb), fp32 states on the device, no fp16, and no `post_validation`."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """Type of master weights of a bf16 model. none: there are none; the bf16 weights are updated in
    fp32 and rounded back with `rounding`."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of optimizer state between steps (fp64 models: fp32 means fp64); the update itself
    always uses the type of the master weights."""
    rounding: Annotated[Literal["stochastic", "nearest"], one_of(*ROUNDS)] = "stochastic"
    """Rounding to bf16. stochastic: at random, with a probability that depends on the distance, so
    that small changes survive on average. nearest: to the nearest value."""
    offload: Annotated[Literal["none", "host", "disk"], OnResume.HARMLESS] = "none"
    """Storage of optimizer state and separate master weights. none: in the same memory as the
    weights; host: in host memory; disk: in a memory-mapped file. Host memory for a GPU is pinned,
    which torch allocates in powers of two: it takes up to twice what the plan says."""
    offload_folder: Annotated[UserPath | None, OnResume.HARMLESS] = None
    """Folder for the files of offload=disk, best on a disk of the node; default: the run folder.
    The files have no name, and vanish with the process."""
    state_window_mib: Annotated[
        float, OnResume.HARMLESS, one_of(*ROUNDS, needs("optimizer.offload"))
    ] = Field(64.0, ge=8)
    """Maximum memory, in MiB, for state windows: the ranges of optimizer state (offloaded, or not
    in fp32) that are being updated. Random numbers for stochastic rounding take 4 MiB of it, on a
    GPU 32 MiB; the minimum on a GPU is therefore 64."""
    loss_scale: Annotated[float | None, FP16] = Field(None, gt=0)
    """With fp16: factor by which the loss is multiplied for the backward, best a power of two.
    Default: dynamic, halved when a gradient is not finite (the step is skipped) and doubled after
    `loss_scale_window` finite steps."""
    loss_scale_window: Annotated[int, FP16, needs("optimizer.loss_scale", None)] = Field(2000, ge=1)
    """With fp16: number of finite steps after which a dynamic loss scale is doubled."""

    @property
    def rule_options(self) -> RuleOptions:
        """Options of `rule`, with defaults filled in. Raises :class:`ConfigError`."""
        return declaration(self.rule).with_options(self.options)

    @property
    def is_user_schedule(self) -> bool:
        """Whether `schedule` is a user-defined function."""
        return is_user_code(self.schedule)

    def least_decay(self, steps: int) -> int:
        """Return the minimum number of decay steps at the end of a run of `steps` steps."""
        if self.schedule == "constant":
            return 0
        if self.decay_steps is not None:
            return self.decay_steps
        if self.is_user_schedule:
            return 0
        return max(1, steps // 10) if self.schedule == "wsd" else 1

    def warmup(self, steps: int) -> int:
        """Return the number of warm-up steps in a run of `steps` steps, also if `warmup_steps` is a
        fraction or null."""
        if self.warmup_steps is None:
            room = max(0, steps - self.least_decay(steps))
            return USUAL_WARMUP if room >= USUAL_WARMUP else min(steps // 10, room)
        if isinstance(self.warmup_steps, float):
            return round(self.warmup_steps * steps)
        return self.warmup_steps


def _optional_kernels(names: list[str]) -> list[str]:
    unknown = set(names) - set(OPTIONAL_KERNELS)
    if unknown:
        raise ValueError(f"no such kernels: {sorted(unknown)}")
    return names


class KernelsConfig(Section):
    """Choice of kernels and of fused computations."""

    ON_RESUME = OnResume.HARMLESS

    only: OnlyKernels = OnlyKernels()
    without: Annotated[
        list[str],
        ExpectedText(f"a list of kernels, of {', '.join(OPTIONAL_KERNELS)}"),
        AfterValidator(_optional_kernels),
    ] = Field(default_factory=list)
    """Kernels that `auto` may not choose, for whichever operation, as in [apex, inductor]."""
    compile: bool = False
    """Compile the blocks with torch.compile, into one graph that all blocks share. The graph is
    compiled, and compared with an uncompiled block, before the first step, which takes up to a
    minute. Norms, activation functions and sums become fewer kernels; `norm` and `swiglu` must be
    torch's, and attention one of torch's backends. Weight gradients are still deferred to W. The
    compiler decides what a block saves for its backward (so activations.policy is keep, full or
    stage), and a recomputed forward agrees with the first forward up to rounding. Not possible with
    dropout or slices of sequences."""
    loss_chunk_tokens: int | None = Field(None, ge=0)
    """Loss chunk: maximum number of tokens whose logits exist at a time. A chunk also has at most
    half of a micro-batch's tokens, unless half is below 128. Losses and all gradients of a chunk
    are computed together in the backward, so the head's weight gradient is part of I. 0: the logits
    of the whole micro-batch are saved from F to I, and the head's weight gradient is deferred to W.
    Default: 256, on a GPU 4096."""

    tp_comm_overlap: bool = True
    """Overlap tensor-parallel collectives of B and W with weight gradients. false: wait for each
    collective where it starts; results are bitwise equal. With sequence parallelism the overlap
    takes memory for one more gathered tensor [s, b, h]."""

    def loss_tokens(self, *, cuda: bool) -> int:
        """Return `loss_chunk_tokens`, with the default for the device filled in.

        On the CPU a loss chunk should fit the cache. A GPU adds the weight gradient of each loss
        chunk to the main gradient at memory speed, which pays off only with many tokens.
        """
        if self.loss_chunk_tokens is not None:
            return self.loss_chunk_tokens
        return 4096 if cuda else 256


class TrainConfig(Section):
    """Length of the run and sizes of its batches."""

    steps: int = Field(300, ge=1, le=10**9)
    """Number of optimizer steps of the whole run, also for the learning-rate schedule."""
    stop_after: Annotated[int | None, OnResume.HARMLESS] = Field(None, ge=1)
    """Step after which the run is saved and ends; the learning-rate schedule is still that of
    `steps` steps. The run is a prefix of the longer run, and continues once this key is raised."""
    sequence_length: Annotated[int, OnResume.ORDER] = Field(256, ge=1)
    """Tokens per sample."""
    global_batch: int = Field(32, ge=1)
    """Samples per step, over all data-parallel replicas."""
    batch_ramp: Annotated[
        list[Annotated[int, Field(ge=1)]] | None,
        ExpectedText("start, increment and samples, as in [16, 8, 300000], or null"),
    ] = Field(None, min_length=3, max_length=3)
    """Grow the global batch. [start, increment, samples]: begin with `start` samples per step, and
    add `increment` after equal shares of the first `samples` samples, until `global_batch` is
    reached. Each size must be a multiple of microbatch x dp that the schedule accepts. Default:
    `global_batch` from the first step on."""
    microbatch: Annotated[int, OnResume.HARMLESS, SEARCHED] = Field(4, ge=1)
    """Samples per micro-batch; a step has global_batch / (microbatch x dp) per replica. auto: that
    of the fastest layout that fits, as `megapipe plan` finds it."""
    loss_function: Annotated[str | None, OnResume.REFUSED] = None
    """Your own loss: `module:name` of a function (logits [b, s, V], labels [b, s], mask [b, s]) ->
    the sum of the unmasked tokens' losses. With `model.source`, logits are what the last layer
    returns. Default: cross-entropy. The function needs all logits at once (no
    kernels.loss_chunk_tokens), and parallel.tp=1."""
    validate_every: Annotated[int, OnResume.HARMLESS] = Field(100, ge=0)
    """Steps between validations; 0: validate only at the end."""
    validation_samples: Annotated[int | None, OnResume.HARMLESS] = Field(256, ge=1)
    """Number of held-out samples per validation; null: all of them."""

    @property
    def batches(self) -> BatchRamp:
        """Global batch of each step."""
        return BatchRamp(self.global_batch, self.batch_ramp)

    @property
    def samples(self) -> int:
        """Number of samples that the whole run takes."""
        return self.batches.after(0, self.steps)

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of a global batch; those of the last batch with ``batch_ramp``."""
        return self.global_batch * self.sequence_length

    @property
    def last_step(self) -> int:
        """Step, counted from 1, after which this start of the run ends."""
        return self.steps if self.stop_after is None else self.stop_after


MAY_HAVE_EXPERTS = Needs(
    EXPERTS.words, lambda config: EXPERTS.is_met(config) or config.model.source is not None
)
"""Condition of keys about experts: ``model.moe.num_experts``, or a user-defined model."""


class LogConfig(Section):
    """Where metrics go, besides the console and log.jsonl in the run folder."""

    ON_RESUME = OnResume.HARMLESS

    every: int = Field(1, ge=1)
    """Steps between lines on the console; log.jsonl has every step."""
    tensorboard: bool = False
    """Write tensorboard events into the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Use Weights & Biases; offline needs no account. The API key is read from the environment."""
    wandb_project: Annotated[str, needs("log.wandb", "online", "offline")] = "megapipe"
    """Project name in Weights & Biases."""
    timeline: list[int] = Field(default_factory=list)
    """Steps, counted from 1, in which the time of each pipeline operation is recorded. The run
    writes a trace for ui.perfetto.dev and a picture to `timeline/` in the run folder, with the
    simulated step next to the real one. Steps that the run does not reach are left out with a note.
    In a no-flush schedule (pipeline.weight_versions) the neighbouring steps are recorded too."""
    expert_counts_every: Annotated[int, MAY_HAVE_EXPERTS] = Field(100, ge=0)
    """Steps between records in log.jsonl of how often each expert of each layer was chosen; the
    last step is recorded too. `megapipe experts show` draws them. 0: never."""
    sample_ids: bool = False
    """Write which samples each step takes to `samples/` in the run folder. `python -m
    megapipe.observe.sample_log FOLDER` checks that each was taken once, over any number of starts.
    A step that a kill has interrupted is called unfinished; the next start repeats it."""
    straggler_window: int = Field(20, ge=0)
    """Number of steps in the timing window for stragglers: after each window, the ranks' median
    compute times are compared, and the console names stragglers. 0: never."""
    profile: list[int] = Field(default_factory=list)
    """Steps, counted from 1, in which torch's profiler writes a trace per rank to `profile/` in the
    run folder, with the names of the pipeline's operations. `python -m megapipe.observe.profile
    FOLDER` joins the traces of a step. On a GPU the operations are NVTX ranges too. Profiled steps
    are slower."""
    memory_history: bool = False
    """On a GPU: record where memory was allocated, for the snapshot that is written when memory
    runs out (`out_of_memory/` in the run folder). It makes every allocation slower."""


class Config(Section):
    """The configuration of a whole run."""

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
    health: HealthConfig = HealthConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    plan: PlanConfig = PlanConfig()

    @property
    def resets_positions(self) -> bool:
        """Whether positions restart in each document."""
        return self.model.may_learn_positions and self.data.resets_positions

    def loss_tokens(self, *, cuda: bool) -> int:
        """Return the maximum number of tokens whose logits exist at a time; 0, which means all, for
        a user-defined loss or model."""
        own = self.train.loss_function is not None or self.model.source is not None
        return 0 if own else self.kernels.loss_tokens(cuda=cuda)
