"""Which checkpoint a run starts from, and loading it; all ranks take the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megapipe.checkpoint.reader import Checkpoint, find_newest
from megapipe.cli import flatten
from megapipe.config import Config
from megapipe.errors import CheckpointError, ConfigError, MegapipeError
from megapipe.mesh import ParallelMesh
from megapipe.plan.params import parameter_shapes
from megapipe.train.agreement import all_or_none
from megapipe.train.step import TrainStep

FREE = ("model.dtype", "model.dropout", "model.init_std")
"""Keys of a model that may differ from the checkpoint's."""


@dataclass
class Source:
    """What a run starts from."""

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


def load(checkpoint: Checkpoint, config: Config, step: TrainStep, mesh: ParallelMesh) -> None:
    """Set weights and states to the checkpoint's. Raises on every rank if it does not fit."""
    error = None
    try:
        _check_model(checkpoint, config, step.optimizer.rule.states)
        step.load(checkpoint)
    except MegapipeError as problem:
        error = problem
    all_or_none(mesh, error)


def _newest(
    checkpoints: Path, damaged: set[Path], skipped: list[str], mesh: ParallelMesh
) -> Path | None:
    """Rank 0 looks; why it passed something over goes into its `skipped`, once."""
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


def _check_model(checkpoint: Checkpoint, config: Config, states: Sequence[str]) -> None:
    """Refuse the weights of a model that computes something else, or without these states."""
    stored = checkpoint.manifest.config
    rule = stored.get("optimizer.rule", "adamw")
    if rule != config.optimizer.rule:
        raise CheckpointError(
            f"{checkpoint.path}: its optimizer state is of optimizer.rule={rule}, the "
            f"configuration has {config.optimizer.rule}"
        )
    for key, value in flatten(config).items():
        if key.startswith("model.") and key not in FREE and stored.get(key) != value:
            raise CheckpointError(
                f"{checkpoint.path}: its {key} is {stored.get(key)}, the configuration has {value}"
            )
    checkpoint.match(
        {
            f"{kind}/{name}": shape
            for kind in ("model", *(f"optimizer.{name}" for name in states))
            for name, shape in parameter_shapes(config.model).items()
        }
    )
