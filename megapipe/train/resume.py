"""Which checkpoint a run starts from, and loading it; all ranks take the same one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.checkpoint.manifest import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, find_newest
from megapipe.config import Config
from megapipe.distributed.agreement import all_or_none
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CheckpointError, ConfigError, MegapipeError

if TYPE_CHECKING:
    from megapipe.train.step import TrainStep


class Finished(Exception):
    """The run has reached its end, so there is nothing to do; the text says how to train on."""


@dataclass
class Source:
    """The start of a run: a checkpoint, of its own or another's, or nothing."""

    checkpoint: Checkpoint | None = None
    """None: initial weights."""
    is_own: bool = False
    """The checkpoint is of this very run."""
    skipped: list[str] = field(default_factory=list)
    """Why newer checkpoints were passed over."""


def choose(config: Config, checkpoints: Path, mesh: ParallelMesh) -> Source:
    """The newest checkpoint in `checkpoints` that is intact, else ``checkpoint.load``.

    Damaged ones are passed over; ``checkpoint.load`` must be intact. Raises
    :class:`CheckpointError` or :class:`ConfigError` on every rank, as ``run.resume`` demands.
    """
    source = Source()
    damaged: set[Path] = set()
    while (path := _newest(checkpoints, damaged, source.skipped, mesh)) is not None:
        if config.run.resume == "never":
            raise ConfigError(
                f"{checkpoints.parent} already has the checkpoint {path.name}, and run.resume is "
                "never; choose another run.name"
            )
        checkpoint, problem = _verified(path, mesh)
        if checkpoint is not None:
            return Source(checkpoint, True, source.skipped)
        source.skipped.append(problem)
        damaged.add(path)
    if damaged or config.run.resume == "must":
        reasons = f": {'; '.join(source.skipped)}" if source.skipped else ""
        raise CheckpointError(f"{checkpoints}: no checkpoint to resume from{reasons}")
    if config.checkpoint.load is not None:
        source.checkpoint, problem = _verified(Path(config.checkpoint.load), mesh)
        if source.checkpoint is None:
            raise CheckpointError(f"checkpoint.load: {problem}")
    return source


def find(path: Path, mesh: ParallelMesh) -> Checkpoint:
    """The checkpoint at `path`, or the newest of those in it; it must be intact.

    Raises :class:`CheckpointError` on every rank.
    """
    is_one = mesh.share("yes" if (path / MANIFEST).exists() else "no") == "yes"
    found = path if is_one else _newest(path, set(), [], mesh)
    if found is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a folder that has one")
    checkpoint, problem = _verified(found, mesh)
    if checkpoint is None:
        raise CheckpointError(problem)
    return checkpoint


def check_end(source: Source, config: Config) -> None:
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


def load(checkpoint: Checkpoint, config: Config, step: TrainStep, mesh: ParallelMesh) -> None:
    """Set weights and states to the checkpoint's. Raises on every rank if it does not fit."""
    error = None
    try:
        kinds = ("model", *(f"optimizer.{name}" for name in step.optimizer.rule.states))
        shapes = step.layout.model.shapes()
        checkpoint.match(
            {f"{kind}/{name}": shape for kind in kinds for name, shape in shapes.items()}
        )
        step.take_over(checkpoint)
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)


def _newest(
    checkpoints: Path, damaged: set[Path], skipped: list[str], mesh: ParallelMesh
) -> Path | None:
    """The newest checkpoint that rank 0 finds; its `skipped` gets why it passed over others."""
    text, error = "", None
    if mesh.rank == 0:
        try:
            found = find_newest(checkpoints, skip=damaged)
            skipped += found.skipped if not damaged else []
            text = str(found.path or "")
        except MegapipeError as problem:
            error = problem
    all_or_none(mesh, error)
    text = mesh.share(text)
    return Path(text) if text else None


def _verified(path: Path, mesh: ParallelMesh) -> tuple[Checkpoint | None, str]:
    """The checkpoint if it is whole, each rank hashing its share of the files; else why not."""
    checkpoint, error = None, None
    try:
        checkpoint = Checkpoint.open(path)
        files = sorted(checkpoint.manifest.files)
        checkpoint.verify(files[mesh.rank :: mesh.world])
    except CheckpointError as problem:
        error = str(problem)
    first = mesh.agree(error)
    return (checkpoint, "") if first is None else (None, first)
