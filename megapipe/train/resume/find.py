"""Search for checkpoints in folders, and verification, with equal results on all ranks."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, NewestCheckpoint, find_newest
from megapipe.checkpoint.storage import StorageLocation, at, location_of
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.convert.folder import HuggingFaceFolder, read_model
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CheckpointError, MegapipeError, StorageError
from megapipe.train.run_folder import patience_s
from megapipe.util.urls import is_remote

_UNREAD = "it may be intact, so it is neither skipped nor removed"
"""Final words of the message on a checkpoint that cannot be read."""


def placed(name: Path | str, config: Config, mesh: ParallelMesh) -> StorageLocation:
    """Return the location of a path or URL; raises on every rank if a needed package is missing."""
    if isinstance(name, Path) or not is_remote(name):
        return Path(name)
    location, error = None, None
    try:
        location = location_of(name, what="URL", patience_s=patience_s(config))
    except MegapipeError as problem:
        error = problem
    raise_on_all(mesh, error)
    assert location is not None
    return location


def find(name: Path | str, config: Config, mesh: ParallelMesh) -> Checkpoint:
    """Return the checkpoint at a path or URL, or the newest one in a folder there.

    Raises :class:`CheckpointError` on every rank, also if the checkpoint is not intact.
    """
    path = placed(name, config, mesh)
    is_one = mesh.share("yes" if at(path / MANIFEST).exists() else "no") == "yes"
    found = path if is_one else newest_of(path, set(), [], mesh)
    if found is None:
        raise CheckpointError(f"{path}: neither a checkpoint nor a folder that has one")
    checkpoint, problem = verified(found, mesh)
    if checkpoint is None:
        raise CheckpointError(problem)
    return checkpoint


class Newest(NamedTuple):
    """Result of a search: the newest intact checkpoint that has states, and what was skipped."""

    checkpoint: Checkpoint | None
    skipped: list[str]
    """Reasons why newer checkpoints were skipped."""
    damaged: bool
    """Whether some checkpoints on the disk are damaged."""
    weights: Checkpoint | None = None
    """Newest intact weights-only checkpoint, if it is newer than `checkpoint`."""


def newest_intact(
    folder: StorageLocation, mesh: ParallelMesh, but: Collection[StorageLocation] = ()
) -> Newest:
    """Find the newest checkpoint in `folder` that :func:`verified` accepts, and a newer
    weights-only checkpoint, if any. Checkpoints in `but` are ignored. Raises
    :class:`CheckpointError` on every rank if a checkpoint cannot be read."""
    skipped: list[str] = []
    passed = {*but}
    weights: Checkpoint | None = None
    while (path := newest_of(folder, passed, skipped, mesh)) is not None:
        checkpoint, problem = verified(path, mesh)
        if checkpoint is None:
            skipped.append(problem)
        elif checkpoint.has_state:
            return Newest(checkpoint, skipped, bool(skipped), weights)
        else:
            weights = weights or checkpoint
        passed.add(path)
    return Newest(None, skipped, bool(skipped), weights)


def newest_of(
    checkpoints: StorageLocation, skip: set[StorageLocation], skipped: list[str], mesh: ParallelMesh
) -> StorageLocation | None:
    """Return the newest checkpoint that rank 0 finds and that is not in `skip`, or None. Reasons
    why newer checkpoints cannot be used are added to `skipped`."""
    found = NewestCheckpoint(None, [])
    error: MegapipeError | None = None
    if mesh.rank == 0:
        try:
            found = find_newest(checkpoints, skip=skip)
        except StorageError as problem:
            error = StorageError(f"{problem}; {_UNREAD}")
        except MegapipeError as problem:
            error = problem
    raise_on_all(mesh, error)
    own = "" if found.path is None else found.path.name
    name, reasons = json.loads(mesh.share(json.dumps([own, found.skipped])))
    skipped += [reason for reason in reasons if reason not in skipped]
    return checkpoints / name if name else None


def verified(path: StorageLocation, mesh: ParallelMesh) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint if it is intact and all values are finite, else None and the reason.
    Each rank reads some of the files. Raises :class:`CheckpointError` on every rank if a rank
    cannot read them."""
    checkpoint, error, unread = None, None, None
    try:
        checkpoint = Checkpoint.open_sound(path, mesh.rank, mesh.world)
    except StorageError as problem:
        unread = StorageError(f"{problem}; {_UNREAD}")
    except CheckpointError as problem:
        error = str(problem)
    raise_on_all(mesh, unread)
    first = mesh.agree(error)
    return (checkpoint, "") if first is None else (None, first)


def open_hugging_face(path: Path, mesh: ParallelMesh) -> HuggingFaceFolder:
    """Open a Hugging Face folder. Rank 0 reads its config. Errors are raised on every rank."""
    text, folder, error = "", None, None
    try:
        if mesh.rank == 0:
            model_type, model = read_model(path)
            text = f"{model_type} {model.model_dump_json()}"
    except MegapipeError as problem:
        error = problem
    raise_on_all(mesh, error)
    model_type, _, fields = mesh.share(text).partition(" ")
    try:
        model = ModelConfig.model_validate_json(fields)
        folder = HuggingFaceFolder.of(path, model_type, model)
    except MegapipeError as problem:
        error = problem
    raise_on_all(mesh, error)
    assert folder is not None
    return folder
