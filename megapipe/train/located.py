"""Finds the folder that a name in ``checkpoint.load`` stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from megapipe.checkpoint.find import OF_A_RUN, latest_run
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST
from megapipe.convert.folder import CONFIG
from megapipe.errors import CheckpointError
from megapipe.paths import exists, is_folder, user_path

LATEST = "latest"
Kind = Literal["checkpoint", "checkpoints", "hugging_face"]
"""A checkpoint, a folder of several, or a folder of Hugging Face's."""


class Located(NamedTuple):
    """A folder, and what it is."""

    kind: Kind
    path: Path


def located(name: str, runs: Path) -> Located:
    """The folder that `name` stands for; `runs` is where `latest` looks. Nothing in it is opened.

    Raises :class:`CheckpointError` if there is none, or if it is none of those.
    """
    if name == LATEST:
        run = latest_run(runs)
        if run is None:
            raise CheckpointError(f"{LATEST}: no run in {runs} has a checkpoint")
        return Located("checkpoints", run / OF_A_RUN)
    path = user_path(name)
    if not is_folder(path):
        raise CheckpointError(
            f"{name}: no such folder; expected a checkpoint, a run folder, a folder of Hugging "
            f"Face's, or {LATEST}"
        )
    if exists(path / MANIFEST):
        return Located("checkpoint", path)
    for folder in (path / OF_A_RUN, path):
        if committed(folder):
            return Located("checkpoints", folder)
    if exists(path / CONFIG):
        return Located("hugging_face", path)
    raise CheckpointError(
        f"{name} is neither a checkpoint ({MANIFEST}), nor a run folder ({OF_A_RUN}/), nor a "
        f"folder of Hugging Face's ({CONFIG})"
    )
