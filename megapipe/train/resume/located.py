"""Finds the folder that a name in ``checkpoint.load`` stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from megapipe.checkpoint.find import OF_A_RUN, latest_run
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.storage import StorageLocation, at, place_of
from megapipe.convert.source import CONFIG
from megapipe.errors import CheckpointError
from megapipe.util.paths import LATEST, is_folder
from megapipe.util.retries import LIMIT_S

Kind = Literal["checkpoint", "checkpoints", "hugging_face"]
"""A checkpoint, a folder of several, or a folder of Hugging Face's."""


class LoadPath(NamedTuple):
    """A folder, and what it is."""

    kind: Kind
    path: StorageLocation


def find_load_path(name: str, runs: StorageLocation, *, patience_s: float = LIMIT_S) -> LoadPath:
    """The folder that `name` stands for; `runs` is where `latest` looks. Nothing in it is opened.

    Requests to a store that a URL names are repeated for `patience_s`.

    Raises :class:`CheckpointError` if there is none, or if it is none of those.
    """
    if name == LATEST:
        root = latest_run(runs)
        if root is None:
            raise CheckpointError(f"{LATEST}: no run in {runs} has a checkpoint")
        return LoadPath("checkpoints", root)
    path = place_of(name, what="URL", patience_s=patience_s)
    if isinstance(path, Path) and not is_folder(path):
        raise CheckpointError(
            f"{name}: no such folder; expected a checkpoint, a run folder, a folder of Hugging "
            f"Face's, or {LATEST}"
        )
    if at(path / MANIFEST).exists():
        return LoadPath("checkpoint", path)
    for folder in (path / OF_A_RUN, path):
        if committed(folder):
            return LoadPath("checkpoints", folder)
    if not isinstance(path, Path):
        raise CheckpointError(f"{name}: neither a checkpoint nor the folder of a run's")
    if at(path / CONFIG).exists():
        return LoadPath("hugging_face", path)
    raise CheckpointError(
        f"{name} is neither a checkpoint ({MANIFEST}), nor a run folder ({OF_A_RUN}/), nor a "
        f"folder of Hugging Face's ({CONFIG})"
    )
