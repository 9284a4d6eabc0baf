"""The start point of a run (a checkpoint of this run or of another one, only weights, or nothing),
and whether the run can begin from it."""

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
from megapipe.train.resume.find_load_path import LoadPath, find_load_path
from megapipe.train.run_folder import own_checkpoints, patience_s, runs_elsewhere
from megapipe.util.user_code import is_class_folder


class Finished(Exception):
    """Raised if the run has reached its end; the text says how to train on."""


@dataclass
class StartPoint:
    """Start point of a run: a checkpoint of this run or of another one, weights, or nothing."""

    checkpoint: Checkpoint | None = None
    """Checkpoint to resume from; None: initial weights, or `weights`."""
    is_own: bool = False
    """Whether the checkpoint belongs to this run."""
    weights: TensorReader | None = None
    """A checkpoint or folder from which only the weights are loaded; `checkpoint` is then None."""
    skipped: list[str] = field(default_factory=list)
    """Reasons why newer checkpoints were skipped."""
    failed: FailedCheckpoints | None = None
    """Checkpoints of this run marked as failed; None unless `is_own`."""
    in_memory: bool = False
    """Whether the checkpoint is an in-memory checkpoint."""

    def notes(self) -> Iterator[str]:
        """Yield lines on what is not read: newer checkpoints, or other files of a folder."""
        for reason in self.skipped:
            yield f"skipped a damaged checkpoint: {reason}"
        weights = self.weights.weights if isinstance(self.weights, Upcycled) else self.weights
        if isinstance(weights, HuggingFaceFolder) and weights.files.note is not None:
            yield weights.files.note

    def take(self, given: Checkpoint | HuggingFaceFolder, config: Config) -> None:
        """Begin from the files `given` of another run: resume, or load only weights, as
        ``checkpoint.load_only`` and ``checkpoint.upcycle`` say."""
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
    """Return the folder that ``checkpoint.load`` names. Raises CheckpointError if it is missing."""
    runs = runs_elsewhere(config) or Path(config.run.folder)
    return find_load_path(str(config.checkpoint.load), runs, patience_s=patience_s(config))


def check_load(config: Config) -> None:
    """Check ``checkpoint.load`` on one process before process groups are made: whether it exists,
    and belongs to the run's model.

    Nothing is checked if the run has its own checkpoints, which have priority. Only headers of
    files are read. All ranks check the contents when they read them. Rank 0 checks later that the
    class of a Hugging Face folder computes the same model. Raises CheckpointError or ConfigError.
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
            if one is None:  # no checkpoint opens: the later search on all ranks says why
                return
            given = Checkpoint.open(one)
        source = StartPoint()
        source.take(given, config)
    except (CheckpointError, ConfigError) as error:
        raise of_load(error) from None
    check_end(source, config)
    changes_since(source, config)


def of_load(error: CheckpointError | ConfigError) -> CheckpointError | ConfigError:
    """Return the error, with the key ``checkpoint.load`` before its text."""
    return type(error)(f"checkpoint.load: {error}")


def check_adapters(source: StartPoint, config: Config) -> None:
    """Raise :class:`ConfigError` if adapters would be trained on top of random weights."""
    loaded = (
        is_class_folder(config.model.source)
        or source.checkpoint is not None
        or source.weights is not None
    )
    if config.lora.rank is not None and not loaded:
        raise ConfigError(
            f"lora.rank={config.lora.rank} trains adapters on frozen weights, and no weights "
            "are loaded: expected checkpoint.load=FOLDER (and checkpoint.load_only=weights), "
            "or lora.rank=null"
        )


def check_end(source: StartPoint, config: Config) -> None:
    """Raise :class:`Finished` if the run has reached its end, :class:`ConfigError` if the
    checkpoint is beyond the end."""
    if source.checkpoint is None:
        return
    train, step, path = config.train, source.checkpoint.step, source.checkpoint.path
    if step > train.steps or (step >= train.last_step and not source.is_own):
        key = "stop_after" if train.steps > step else "steps"
        raise ConfigError(
            f"{path} is of step {step}, where train.{key}={train.last_step} leaves nothing to "
            "do: raise it, or choose another run.name to start over"
        )
    if step == train.steps:
        raise Finished(
            f"{path} is of the last of {train.steps} steps: the run is finished; to train on, "
            "raise train.steps; to start over, choose another run.name"
        )
    if step >= train.last_step:
        raise Finished(
            f"{path} is of step {step} of {train.steps}, and "
            f"train.stop_after={train.stop_after}: to train on, raise it or set it to null"
        )


def changes_since(source: StartPoint, config: Config, corpus: Change | None = None) -> Changes:
    """Return the changes since the start point was saved, with the change of the `corpus` if known.
    Raises CheckpointError for changes with which the run cannot resume."""
    if source.weights is not None:
        return changes.check_weights(source.weights.path, source.weights.config, config)
    if source.checkpoint is None:
        return Changes()
    return changes.check(source.checkpoint, config, own=source.is_own, corpus=corpus)
