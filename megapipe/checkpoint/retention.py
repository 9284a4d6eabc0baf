"""Removing what is no longer needed: old checkpoints, and what killed saves left behind."""

import os
import secrets
import shutil
from pathlib import Path

from megapipe.checkpoint.durable import sync_folder
from megapipe.checkpoint.folders import STAGING_PREFIX, committed
from megapipe.checkpoint.reader import Checkpoint
from megapipe.errors import CheckpointError


def retain(root: Path, keep: int, newest: Path) -> list[Path]:
    """Keep the `keep` newest checkpoints that open, and all newer than those; remove the rest.

    Call it on one rank after :func:`~megapipe.checkpoint.writer.save` has returned `newest`, with
    no other save under way in `root`. `newest` is opened first and always kept. A folder is
    renamed to a staging name before it is removed, so a kill in between never leaves half a
    checkpoint; staging leftovers of earlier kills are removed too. Returns the removed
    checkpoints. Raises CheckpointError, having removed nothing, if `newest` does not open; and if
    something cannot be removed.
    """
    Checkpoint.open(newest)
    removed: list[Path] = []
    sound = 0
    try:
        for key in committed(root):
            path = root / key.name
            if key.name == newest.name or sound < keep:
                sound += _opens(path)
                continue
            os.rename(path, root / f"{STAGING_PREFIX}removed-{secrets.token_hex(8)}")
            removed.append(path)
        sync_folder(root)
        for leftover in root.glob(f"{STAGING_PREFIX}*"):
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
    except OSError as error:
        raise CheckpointError(f"cannot remove {error.filename}: {error.strerror}") from error
    return removed


def _opens(path: Path) -> bool:
    try:
        Checkpoint.open(path)
    except CheckpointError:
        return False
    return True
