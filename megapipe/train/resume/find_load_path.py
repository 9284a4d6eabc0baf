"""Look-up of the folder to which ``checkpoint.load`` refers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from megapipe.checkpoint.find import OF_A_RUN, latest_run
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.checkpoint.storage import StorageLocation, at, location_of
from megapipe.convert.weight_source import CONFIG
from megapipe.errors import CheckpointError
from megapipe.util.paths import LATEST, is_folder
from megapipe.util.retries import LIMIT_S

Kind = Literal["checkpoint", "checkpoints", "hugging_face"]
"""Kind of a folder: one checkpoint, several checkpoints, or a Hugging Face model."""


class LoadPath(NamedTuple):
    """A folder, and the kind of folder."""

    kind: Kind
    path: StorageLocation


def find_load_path(name: str, runs: StorageLocation, *, patience_s: float = LIMIT_S) -> LoadPath:
    """Return the folder that `name` stands for; `latest` stands for the run in `runs` that saved
    last. No file is opened.

    Requests to an object store are repeated for `patience_s` seconds. Raises
    :class:`CheckpointError` if the folder does not exist, or is of no known kind.
    """
    if name == LATEST:
        root = latest_run(runs)
        if root is None:
            raise CheckpointError(f"{LATEST}: no run in {runs} has a checkpoint")
        return LoadPath("checkpoints", root)
    path = location_of(name, what="URL", patience_s=patience_s)
    if isinstance(path, Path) and not is_folder(path):
        raise CheckpointError(
            f"{name}: no such folder: expected a checkpoint, a run folder, a Hugging Face "
            f"folder, or {LATEST}"
        )
    if at(path / MANIFEST).exists():
        return LoadPath("checkpoint", path)
    for folder in (path / OF_A_RUN, path):
        if committed(folder):
            return LoadPath("checkpoints", folder)
    if not isinstance(path, Path):
        raise CheckpointError(f"{name} is neither a checkpoint nor the checkpoints folder of a run")
    if at(path / CONFIG).exists():
        return LoadPath("hugging_face", path)
    raise CheckpointError(
        f"{name} is neither a checkpoint ({MANIFEST}), nor a run folder ({OF_A_RUN}/), nor a "
        f"Hugging Face folder ({CONFIG})"
    )
