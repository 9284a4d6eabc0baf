"""The configuration tree: every key, its type, its default and what it means.

Loading (YAML, command line) is in :mod:`megapipe.cli`; this module imports no torch, so a wrong
value is reported before anything heavy starts.
"""

from typing import Literal

from pydantic import Field

from megapipe.model.config import ModelConfig
from megapipe.section import Section


class RunConfig(Section):
    """Where a run lives."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run; its folder is `folder`/`name`."""
    folder: str = "runs"
    """Folder that holds the runs."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """On CUDA: only deterministic kernels and a pinned NCCL algorithm, so that equal runs are
    bitwise equal; slower. On the CPU they always are."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the run folder's newest checkpoint if there is one; never: refuse a
    folder that has one; must: fail if there is none."""


class ParallelConfig(Section):
    """The process mesh: pp x dp x cp x tp, tp innermost."""

    dp: int | None = Field(None, ge=1)
    """Data-parallel replicas; default: what the number of processes leaves."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel ranks: heads, MLP and vocabulary are split over them."""
    pp: int = Field(1, ge=1)
    """Pipeline ranks."""
    cp: Literal[1] = 1
    """Context-parallel ranks (only 1 so far)."""
    sequence_parallel: bool = False
    """Keep activations between the tensor-parallel regions split by sequence over tp."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication library; auto: nccl when every process has a GPU of its own, else gloo."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: cuda if there is one."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds after which a collective or a message that no peer answers is an error."""


class PipelineConfig(Section):
    """How the layers become stages, and the order in which the stages work."""

    schedule: str = "1f1b"
    """Name of a registered schedule (`scripts/schedule.py list` shows them), a function of your
    own as `module:function`, or a file of operations that ends in `.csv`; auto: measure the first
    steps, search for what they cost, and go on with what was found."""
    placement: Literal["loop", "v", "wave"] | None = None
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
    the parts take equal numbers of FLOPs."""
    pairs: int | None = Field(None, ge=1)
    """chimera: pairs of pipelines in opposite directions, each with its copies of the weights."""
    memory_limit: float | None = Field(None, gt=0)
    """Most activations of a pipeline rank, in micro-batches of all its layers, each held until its
    weight gradient. Searched schedules (zb_1p, zb_2p, auto) keep to it, others are refused above
    it. Default of auto: what the schedule that it begins with holds."""
    layout: str | list[int] | None = None
    """Which layers each stage holds: a list of layer counts, or a string of stages divided by
    `|` made of E (embedding), L or L*n (layers) and H (head), as in "E L*3 | L*4 | L*3 H";
    default: even by cost, embedding and head counted."""
    channels: Literal["process_group", "in_process"] = "process_group"
    """process_group: one process per pipeline rank; in_process: each process runs all pipeline
    ranks' programs itself, so the number of processes is dp x cp x tp."""
    debug: bool = False
    """Send a header with each message and check it on arrival; fill buffers with NaN before
    a receive."""


class DataConfig(Section):
    """The corpus and its tokenizer."""

    source: str = "stdlib"
    """`stdlib` (source text of the running Python's standard library, nothing to fetch), a file
    (.txt, .jsonl, .json, .parquet; anything else is read as text), a folder of such files, a
    folder saved by `datasets`, or the name of a data set on the Hugging Face hub."""
    subset: str | None = None
    """Configuration name of a hub data set."""
    text_field: str = "text"
    """Field that holds the text in JSONL, parquet and hub data sets."""
    tokenizer: str = "byte"
    """`byte` (256 bytes and an end-of-document mark), a local folder or tokenizer.json, or the
    name of a tokenizer on the Hugging Face hub."""
    validation_fraction: float = Field(0.02, gt=0, lt=1)
    """Share of the documents held out for validation."""
    cache: str = "cache"
    """Folder for tokenized corpora."""
    mask_document_ends: bool = False
    """Leave the prediction of end-of-document marks out of the loss."""


class OptimizerConfig(Section):
    """AdamW with a learning-rate schedule (Loshchilov and Hutter, 1711.05101)."""

    lr: float = Field(3e-4, ge=0)
    """Peak learning rate."""
    min_lr: float = Field(3e-5, ge=0)
    """Learning rate at the end of the decay."""
    warmup_steps: int = Field(100, ge=0)
    """Steps of linear warm-up from 0."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Decay after the warm-up; wsd (warm-up, stable, decay) holds the peak until the last
    `decay_steps`."""
    decay_steps: int | None = Field(None, ge=1)
    """Steps of the decay; default: all after the warm-up (wsd: a tenth of all steps)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms and biases have none."""
    clip: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; null: no clipping."""
    zero: Literal[0, 1] = 1
    """ZeRO stage: 1 shards master weights and optimizer state over dp; 0 replicates them."""


class TrainConfig(Section):
    """Length of the run and sizes of its batches."""

    steps: int = Field(300, ge=1)
    """Optimizer steps in all."""
    sequence_length: int = Field(256, ge=1)
    """Tokens per sample."""
    global_batch: int = Field(32, ge=1)
    """Samples per step over all replicas."""
    microbatch: int = Field(4, ge=1)
    """Samples per micro-batch; global_batch / (microbatch x dp) micro-batches make a step."""
    validate_every: int = Field(100, ge=0)
    """Steps between validations; 0: only at the end."""
    validation_samples: int | None = Field(256, ge=1)
    """Held-out samples per validation; null: all of them."""


class CheckpointConfig(Section):
    """When to save and how much to keep."""

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    load: str | None = None
    """Start from this checkpoint folder (weights, optimizer, step) if the run has none itself."""


class LogConfig(Section):
    """Where numbers go; the console and log.jsonl in the run folder are always on."""

    every: int = Field(1, ge=1)
    """Steps between console lines (log.jsonl has every step)."""
    tensorboard: bool = False
    """Write tensorboard events into the run folder."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; offline needs no account. The key comes from the environment only."""
    wandb_project: str = "megapipe"
    """Project name in Weights & Biases."""
    timeline: list[int] = Field(default_factory=list)
    """Steps, counted from 1, of which the time of each pipeline operation is recorded: a trace
    for ui.perfetto.dev and a picture, each with the simulation next to it, go to
    `timeline/` in the run folder."""
    peak_tflops: float | None = Field(None, gt=0)
    """Dense peak of one device for the MFU; default: known for common GPUs, else no MFU."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
