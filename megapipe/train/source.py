"""The start of a run: a checkpoint, of its own or another's, weights alone, or nothing; and whether
the run can begin with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.reader import Checkpoint, find_newest
from megapipe.checkpoint.stateful import TensorReader
from megapipe.config.config import Config
from megapipe.convert.folder import HuggingFaceFolder
from megapipe.errors import CheckpointError, ConfigError
from megapipe.train.moe.upcycle import Upcycled
from megapipe.train.resume import changes
from megapipe.train.resume.changes import Change, Changes
from megapipe.train.resume.located import LoadPath, find_load_path
from megapipe.train.run_folder import own_checkpoints, patience_s, runs_elsewhere


class Finished(Exception):
    """The run has reached its end, so there is nothing to do; the text says how to train on."""


@dataclass
class StartPoint:
    """The start of a run: a checkpoint, of its own or another's, or nothing."""

    checkpoint: Checkpoint | None = None
    """None: initial weights."""
    is_own: bool = False
    """The checkpoint is of this very run."""
    weights: TensorReader | None = None
    """Of which nothing but the weights is taken; then there is no `checkpoint`."""
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints were passed over."""
    failed: FailedCheckpoints | None = None
    """The run's own checkpoints that are passed over; None where it has no `checkpoint` of its
    own."""
    in_memory: bool = False
    """The checkpoint is a copy in the memory of the nodes."""

    def notes(self) -> Iterator[str]:
        """Yield lines on what is not read: newer checkpoints, or a folder's other files."""
        for reason in self.skipped:
            yield f"passed over a damaged checkpoint: {reason}"
        weights = self.weights.weights if isinstance(self.weights, Upcycled) else self.weights
        if isinstance(weights, HuggingFaceFolder) and weights.files.note is not None:
            yield weights.files.note

    def take(self, given: Checkpoint | HuggingFaceFolder, config: Config) -> None:
        """Begin with another's, as ``checkpoint.load_only`` and ``checkpoint.upcycle`` say."""
        weights: TensorReader = given
        if config.checkpoint.upcycle:
            self.weights = Upcycled.of(weights, config)
        elif (
            isinstance(given, Checkpoint)
            and config.checkpoint.load_only == "all"
            and given.has_state
        ):
            self.checkpoint = given
        else:
            self.weights = weights


def folder_to_load(config: Config) -> LoadPath:
    """The folder that ``checkpoint.load`` stands for. Raises CheckpointError if there is none."""
    runs = runs_elsewhere(config) or Path(config.run.folder)
    return find_load_path(str(config.checkpoint.load), runs, patience_s=patience_s(config))


def check_load(config: Config) -> None:
    """Check what one process can tell of ``checkpoint.load`` before groups are made: that it is
    there, and of the run's model.

    Nothing is looked at where the run has checkpoints of its own, which come first, and of files
    no more than their headers: what they hold is checked by all ranks when they read it, and what
    the class of a folder of Hugging Face's computes by rank 0 when all open it. Raises
    CheckpointError or ConfigError.
    """
    if config.checkpoint.load is None:
        return
    if committed(own_checkpoints(config)):
        return
    try:
        found = folder_to_load(config)
        given: Checkpoint | HuggingFaceFolder
        if found.kind == "hugging_face":
            assert isinstance(found.path, Path)
            given = HuggingFaceFolder.open(found.path, compare=False)
        else:
            one = found.path if found.kind == "checkpoint" else find_newest(found.path).path
            if one is None:  # none of them opens: why is told where all are looked through
                return
            given = Checkpoint.open(one)
        source = StartPoint()
        source.take(given, config)
    except (CheckpointError, ConfigError) as error:
        raise of_load(error) from None
    check_end(source, config)
    changes_since(source, config)


def of_load(error: CheckpointError | ConfigError) -> CheckpointError | ConfigError:
    """The error with the key that led to it."""
    return type(error)(f"checkpoint.load: {error}")


def check_adapters(source: StartPoint, config: Config) -> None:
    """Raise :class:`ConfigError` where adapters would be trained beside random weights."""
    if config.lora.rank is not None and source.checkpoint is None and source.weights is None:
        raise ConfigError(
            f"lora.rank={config.lora.rank} trains adapters beside weights that stay as they are: "
            "expected checkpoint.load=FOLDER (and checkpoint.load_only=weights), or lora.rank=null"
        )


def check_end(source: StartPoint, config: Config) -> None:
    """Raise :class:`Finished` where the run has reached its end, :class:`ConfigError` where the
    checkpoint lies beyond it."""
    if source.checkpoint is None:
        return
    train, step, path = config.train, source.checkpoint.step, source.checkpoint.path
    if step > train.steps or (step >= train.last_step and not source.is_own):
        key = "stop_after" if train.steps > step else "steps"
        raise ConfigError(
            f"{path} is of step {step}, where train.{key}={train.last_step} leaves nothing to do; "
            "expected more, or another run.name to begin anew"
        )
    if step == train.steps:
        raise Finished(
            f"{path} is of the last of {train.steps} steps: the run is finished; to train on raise "
            "train.steps, to begin anew choose another run.name"
        )
    if step >= train.last_step:
        raise Finished(
            f"{path} is of step {step} of {train.steps}, and train.stop_after={train.stop_after}: "
            "to train on raise it, or set null"
        )


def changes_since(source: StartPoint, config: Config, corpus: Change | None = None) -> Changes:
    """Changes since the checkpoint, of the corpus if one is known; raises CheckpointError for what
    cannot go on."""
    if source.weights is not None:
        return changes.check_weights(source.weights.path, source.weights.config, config)
    if source.checkpoint is None:
        return Changes()
    return changes.check(source.checkpoint, config, own=source.is_own, corpus=corpus)
