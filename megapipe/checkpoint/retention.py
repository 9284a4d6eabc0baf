"""Removal of old checkpoints, and of the leftovers of killed saves."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megapipe.checkpoint.failed import forget_removed
from megapipe.checkpoint.folders import leftovers, note_removed
from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError


class Removal(NamedTuple):
    """Result of a removal: the removed checkpoints or leftovers, and the problems."""

    removed: list[StorageLocation]
    problems: list[str]
    """One line for each path that still exists."""


def outdated(
    paths: Iterable[StorageLocation],
    keep: int,
    newest: StorageLocation,
    is_sound: Callable[[StorageLocation], bool],
) -> list[StorageLocation]:
    """Return the checkpoints in `paths` (ordered newest first) that can be removed.

    A checkpoint is sound if it is intact and all its values are finite. The `keep` newest sound
    checkpoints stay, and so does `newest`, the one that was saved last. A checkpoint that is not
    sound stays if fewer than `keep` newer ones are sound, and fewer than `keep` newer ones are not.
    `is_sound` is only called for checkpoints that may stay.
    """
    paths = list(paths)
    if len(paths) <= keep:
        return []
    old: list[StorageLocation] = []
    sound = others = 0
    for path in paths:
        if sound >= keep and path != newest:
            old.append(path)
        elif is_sound(path):
            sound += 1
        elif others < keep or path == newest:
            others += 1
        else:
            old.append(path)
    return old


def remove(
    root: StorageLocation, checkpoints: Iterable[StorageLocation], *, alone: bool = True
) -> Removal:
    """Remove checkpoints of the folder `root` with their marks, and the leftovers of killed saves.

    Call this function on one rank. With `alone` False a save may be in progress in `root`, or start
    meanwhile, so folders of unfinished saves stay. A checkpoint is turned into a leftover in one
    step before its files are removed, so a kill never leaves half of a checkpoint. The checkpoints'
    names are recorded before the removal (after it if the disk is full), so that they are not
    reused.
    """
    removed: list[StorageLocation] = []
    left: list[StorageLocation] = []
    problems: list[str] = []
    checkpoints = list(checkpoints)
    not_noted = _note(root, checkpoints)
    for path in checkpoints:
        try:
            left.append(at(path).withdraw())
            removed.append(path)
        except (OSError, CheckpointError) as error:
            problems.append(_cannot(path, error))
    if removed:
        try:
            forget_removed(root)
            at(root).sync()
        except (OSError, CheckpointError) as error:
            problems.append(_cannot(root, error))
    problems += (clear_leftovers(root) if alone else _clear(left)).problems
    if not_noted is not None and (still_not := _note(root, removed)) is not None:
        problems.append(still_not)
    return Removal(removed, problems)


def _note(root: StorageLocation, checkpoints: Iterable[StorageLocation]) -> str | None:
    """Record names of removed checkpoints, which are never reused; return an error text or None."""
    keys = [key for path in checkpoints if (key := CheckpointName.parsed(path.name)) is not None]
    try:
        if keys:
            note_removed(root, keys)
    except (OSError, CheckpointError) as error:
        return f"{root}: names of removed checkpoints may be used again: {error}"
    return None


def clear_leftovers(root: StorageLocation) -> Removal:
    """Remove the leftovers of killed saves and removals in `root`, if it exists. No save may be in
    progress in `root`."""
    try:
        found = leftovers(root)
    except CheckpointError as error:
        return Removal([], [str(error)])
    return _clear(found)


def _clear(found: Iterable[StorageLocation]) -> Removal:
    removed: list[StorageLocation] = []
    problems: list[str] = []
    for leftover in found:
        try:
            at(leftover).remove()
            removed.append(leftover)
        except (OSError, CheckpointError) as error:
            problems.append(_cannot(leftover, error))
    return Removal(removed, problems)


def _cannot(path: StorageLocation, error: OSError | CheckpointError) -> str:
    if isinstance(error, OSError):
        why = f"cannot remove {error.filename or path}: {error.strerror}"
    else:
        why = str(error)
    return f"{why}; it takes disk space until you do"
