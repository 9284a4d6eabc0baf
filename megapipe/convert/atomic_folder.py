"""New folders that appear complete or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.checkpoint.durable import sync_folder
from megapipe.errors import CheckpointError


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into, which is renamed to `path` when the block ends.

    The folder is a neighbour of `path`, its name begins with a dot, and a failure removes it.

    Raises:
        CheckpointError: `path` exists already, or nothing can be written there.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already; choose another folder")
    staging = path.parent / f".{path.name}-{secrets.token_hex(8)}"
    try:
        staging.mkdir(parents=True)
        try:
            yield staging
            _sync(staging)
            os.rename(staging, path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    """Make all files in a folder durable."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)
