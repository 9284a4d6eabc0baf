"""Checkpoints in folders, found and verified by all ranks alike."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.reader import Checkpoint, NewestCheckpoint, find_newest
from megapipe.checkpoint.storage import StorageLocation, at, place_of
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.convert.folder import HuggingFaceFolder, read_model
from megapipe.distributed.agreement import raise_on_all
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CheckpointError, MegapipeError, StorageError
from megapipe.train.run_folder import patience_s
from megapipe.util.urls import is_remote

_UNREAD = "it may be intact, so it is neither passed over nor removed"
"""The end of a sentence on a checkpoint that cannot be read."""


def placed(name: Path | str, config: Config, mesh: ParallelMesh) -> StorageLocation:
    """The place of a path or a URL; raises on every rank where one lacks what a URL needs."""
    if isinstance(name, Path) or not is_remote(name):
        return Path(name)
    place, error = None, None
    try:
        place = place_of(name, what="URL", patience_s=patience_s(config))
    except MegapipeError as problem:
        error = problem
    raise_on_all(mesh, error)
    assert place is not None
    return place


def find(name: Path | str, config: Config, mesh: ParallelMesh) -> Checkpoint:
    """The checkpoint at a path or URL, or the newest of those in it; it must be intact.

    Raises :class:`CheckpointError` on every rank.
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
    """The newest checkpoint that is intact and has states, and those that are not."""

    checkpoint: Checkpoint | None
    skipped: list[str]
    """Why newer ones were passed over."""
    damaged: bool
    """Some on the disk are damaged."""
    weights: Checkpoint | None = None
    """The newest of weights alone that is intact, of those that are newer."""


def newest_intact(
    folder: StorageLocation, mesh: ParallelMesh, but: Collection[StorageLocation] = ()
) -> Newest:
    """The newest checkpoint in `folder` that :func:`verified` finds nothing wrong with, of all
    `but` some, and one of weights alone that is newer. Raises :class:`CheckpointError` on every
    rank where one cannot be read."""
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
    """The newest checkpoint that rank 0 finds; `skipped` gets why it passed over others."""
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
    """The checkpoint if it is whole and its values are finite, else why not. Each rank reads its
    share of the files. Raises :class:`CheckpointError` on every rank if one cannot read them."""
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
    """A folder of Hugging Face's, whose config rank 0 reads; raises on every rank."""
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
