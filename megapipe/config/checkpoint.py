"""The section `checkpoint` of the configuration: when a run saves, and from what it starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.moe import EXPERTS
from megapipe.config.section import ExpectedText, OnResume, Section, UserPath, needs

LOAD = needs("checkpoint.load")


class CheckpointConfig(Section):
    """When a run saves its state, how much it keeps, and from what it starts."""

    ON_RESUME = OnResume.HARMLESS

    every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only `every_minutes` counts. The last step is always saved."""
    every_minutes: float = Field(15.0, ge=0)
    """Maximum number of minutes between checkpoints, by rank 0's clock; 0: only `every` counts."""
    keep: int = Field(2, ge=1)
    """Number of checkpoints to keep: the newest intact ones that were followed by a step with a
    finite loss. Newer checkpoints are kept until such a step follows. Checkpoints of weights only,
    which a run never saves itself, are always kept."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints of steps that are multiples of this number are kept for good; 0: none."""
    grace_s: float | None = Field(None, gt=0)
    """Seconds from the signal that asks a job to end until the scheduler kills its processes. A
    save that would not finish in time, judged by the duration of the previous save, is not started;
    the next start then resumes from the previous checkpoint. null: a save always starts."""
    async_save: bool = False
    """Save while training goes on: training waits only until the state is copied to host memory,
    and threads write the copy (the plan shows its size). If the next save is due before that,
    training waits; the end of the run waits for the final save. A kill loses an incomplete save."""
    url: Annotated[str | None, ExpectedText("a URL such as s3://bucket/path, or null")] = None
    """URL of a folder on object storage for the run's checkpoints: `s3://bucket/path`, `gs://...`
    or any other that fsspec opens. The checkpoints get a folder in it with the run's name, which no
    other run may use. Default: `checkpoints/` in the run folder, which has everything else in any
    case. Credentials come from the environment, or from fsspec's configuration."""
    in_memory_every: int = Field(0, ge=0)
    """Steps between in-memory checkpoints; 0: none. They are in the memory of the nodes and outlive
    the processes: a launcher with `--max-restarts` restarts the run from them after a fault, and
    removes them when the launcher ends. With several nodes, each node also keeps those of the
    previous node. The newest two are kept: the plan shows how much memory that takes."""
    export_every: int = Field(0, ge=0)
    """Steps between exports of the weights to `exports/` in the run folder, as Hugging Face folders
    in bf16; 0: none. All exports are kept. An export is made from a checkpoint, which is saved for
    this purpose; rank 0 writes the export while the other ranks wait, which may take at most
    `parallel.timeout_s`."""
    load: UserPath | None = None
    """Start point of a run that has no checkpoint of its own, in any layout: a checkpoint folder, a
    run folder (its newest intact checkpoint), a Hugging Face folder, the URL of a checkpoint or run
    on object storage, or `latest`: the run in `run.folder` (or in `url`, if that is set) that saved
    most recently. The model must be the same; `megapipe convert inspect FOLDER --config` prints the
    section `model` of a folder."""
    load_only: Annotated[Literal["all", "weights"], LOAD] = "all"
    """State to take from `load`. all: weights, optimizer state, step and consumed samples; weights:
    only weights, and the run begins at step 0 and sample 0 with a new optimizer. From a Hugging
    Face folder or another checkpoint of weights only, just the weights are taken in any case."""
    upcycle: Annotated[bool, EXPERTS, LOAD] = False
    """Whether `load` names a dense model: each expert begins with the MLP of its layer, and each
    router with random weights. Only weights are taken. `model.moe.expert_ffn_hidden` must be the
    width of the MLP. If the weights of a token's choices sum to 1, the run begins with the loss of
    the dense model (Komatsuzaki et al., 2212.05055)."""
