"""The section `checkpoint` of the configuration: when a run saves, and what it begins from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megapipe.config.moe import EXPERTS
from megapipe.config.section import ExpectedText, OnResume, Section, UserPath, needs

LOAD = needs("checkpoint.load")


class CheckpointConfig(Section):
    """When to save and how much to keep."""

    ON_RESUME = OnResume.HARMLESS

    every: int = Field(0, ge=0)
    """Steps between checkpoints, besides those by time; 0: none by steps. The last step is always
    saved."""
    every_minutes: float = Field(15.0, ge=0)
    """Minutes from one checkpoint to the next, at most, by the clock of rank 0; 0: none by time."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints to keep: of those that are intact, and that a step with finite numbers has
    followed. One that is just saved is kept besides, until then, and so are those of weights alone,
    which a run never saves itself."""
    keep_every: int = Field(0, ge=0)
    """Keep checkpoints of steps that are multiples of this for good; 0: none."""
    grace_s: float | None = Field(None, gt=0)
    """Seconds from a signal that asks for the end until whoever sent it kills the processes, as a
    scheduler does. A save that would not be over by then, if it took as long as the last one, is
    not begun, and the next start goes on from the checkpoint before. null: one always begins."""
    background: bool = False
    """Save while training goes on: it waits until the state is copied to host memory, and threads
    write the copy. The plan says how much memory that takes. A save that falls due meanwhile waits
    for the one before; that of the last step is waited for. A kill loses the save under way."""
    folder: Annotated[str | None, ExpectedText("a URL such as s3://bucket/path, or null")] = None
    """URL of a folder on object storage, `s3://bucket/path`, `gs://...` or whatever fsspec opens,
    in which the run's checkpoints are, in a folder with the run's name; default: `checkpoints/` in
    the run folder, which has all else in any case. No two run folders may have one name there.
    Credentials come from the environment, or from fsspec's configuration."""
    memory_every: int = Field(0, ge=0)
    """Steps between copies of the state in the memory of the nodes, from which a launcher with
    `--restarts` starts the run again when a fault has ended it; 0: none. Processes that die leave
    them, and of several nodes each also has the copies of the one before it. They are removed when
    the launcher ends. Two are kept: the plan says how much memory that takes."""
    export_every: int = Field(0, ge=0)
    """Steps between exports of the weights, in bf16 and in Hugging Face's form, to `exports/` in
    the run folder, where all are kept; 0: none. Each is made of a checkpoint, which is saved for
    it; rank 0 writes it while the others wait, which may take no longer than
    `parallel.timeout_s`."""
    load: UserPath | None = None
    """Start from this if the run has no checkpoint itself, or weights alone, in any layout: a
    checkpoint folder, a run folder (its newest intact checkpoint), a folder of Hugging Face's, the
    URL of a checkpoint or of a run's on object storage, or `latest`: the run in `run.folder`, or in
    `folder` if that is given, that has saved last. The model has to be the same; `megapipe convert
    inspect FOLDER --config` prints its section."""
    load_only: Annotated[Literal["all", "weights"], LOAD] = "all"
    """Take this from `load`. all: weights, optimizer, step and samples; weights: the run begins
    at step 0 and sample 0 with a new optimizer, as it always does from a folder of Hugging Face's
    or another checkpoint that has nothing but weights."""
    upcycle: Annotated[bool, EXPERTS, LOAD] = False
    """With `load`, which names a dense model: each expert of the run begins as a copy of the MLP of
    its layer, and routers afresh. Weights alone are taken. `model.moe.ffn` is the width of the MLP;
    where the weights of a token's choices sum to 1 the run begins with the loss of the dense model
    (Komatsuzaki et al., 2212.05055)."""
