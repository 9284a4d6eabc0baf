"""Removing what is no longer needed: old checkpoints, and what killed saves left behind."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from megapipe.checkpoint.durable import sync_folder
from megapipe.checkpoint.folders import STAGING_PREFIX


class Removal(NamedTuple):
    """Result of a removal, which goes on after what cannot be removed."""

    removed: list[Path]
    problems: list[str]
    """A line for each that is still there."""


def outdated(
    paths: Iterable[Path], keep: int, newest: Path, is_sound: Callable[[Path], bool]
) -> list[Path]:
    """The checkpoints, of `paths` from the newest to the oldest, that are not needed any more.

    The `keep` newest of those that are sound stay, as do `newest`, which was saved last, and all
    that are newer than these. `is_sound` is asked for those that may stay, as far as one could go.
    """
    paths = list(paths)
    if len(paths) <= keep:
        return []
    old: list[Path] = []
    sound = 0
    for path in paths:
        if sound >= keep and path != newest:
            old.append(path)
        else:
            sound += is_sound(path)
    return old


def remove(root: Path, checkpoints: Iterable[Path]) -> Removal:
    """Remove checkpoints of the folder `root`, and what killed saves left there.

    Call it on one rank, with no save under way in `root`. A folder is renamed to a staging name
    before it is removed, so a kill in between never leaves half a checkpoint.
    """
    removed: list[Path] = []
    problems: list[str] = []
    for path in checkpoints:
        try:
            os.rename(path, root / f"{STAGING_PREFIX}removed-{secrets.token_hex(8)}")
            removed.append(path)
        except OSError as error:
            problems.append(_cannot(path, error))
    if removed:
        try:
            sync_folder(root)
        except OSError as error:
            problems.append(_cannot(root, error))
    return Removal(removed, problems + clear_leftovers(root).problems)


def clear_leftovers(root: Path) -> Removal:
    """Remove what killed saves and removals left in `root`, if it is there, as :func:`remove`."""
    removed: list[Path] = []
    problems: list[str] = []
    for leftover in sorted(root.glob(f"{STAGING_PREFIX}*")):
        try:
            if leftover.is_dir() and not leftover.is_symlink():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
            removed.append(leftover)
        except OSError as error:
            problems.append(_cannot(leftover, error))
    return Removal(removed, problems)


def _cannot(path: Path, error: OSError) -> str:
    return f"cannot remove {error.filename or path}: {error.strerror}; it takes room until you do"
