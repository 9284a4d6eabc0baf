"""Removing what is no longer needed: old checkpoints, and what killed saves left behind."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megapipe.checkpoint.failed import forget_removed
from megapipe.checkpoint.folders import leftovers, note_removed
from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError


class Removal(NamedTuple):
    """Result of a removal, which goes on after what cannot be removed."""

    removed: list[StorageLocation]
    problems: list[str]
    """A line for each that is still there."""


def outdated(
    paths: Iterable[StorageLocation],
    keep: int,
    newest: StorageLocation,
    is_sound: Callable[[StorageLocation], bool],
) -> list[StorageLocation]:
    """The checkpoints, of `paths` from the newest to the oldest, that are not needed any more.

    The `keep` newest of those that are sound stay, as do `newest`, which was saved last, and of
    those that are newer than these, but not sound, the `keep` newest. `is_sound` is asked for those
    that may stay, as far as one could go.
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
    """Remove checkpoints of the folder `root`, with their marks, and what killed saves left there.

    Their names are kept from being given again before they go; where the disk is too full for that,
    after them.
    Call it on one rank. Where a save may be under way in `root`, or begin, `alone` is to be False,
    and what may be half of it stays. A checkpoint is withdrawn in one step before its files are
    removed, so a kill in between never leaves half of it.
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
    """Keep names of checkpoints from being given again; returns why that fails."""
    keys = [key for path in checkpoints if (key := CheckpointName.parsed(path.name)) is not None]
    try:
        if keys:
            note_removed(root, keys)
    except (OSError, CheckpointError) as error:
        return f"{root}: names of checkpoints that are removed may be given again: {error}"
    return None


def clear_leftovers(root: StorageLocation) -> Removal:
    """Remove what killed saves and removals left in `root`, if it is there, as :func:`remove`."""
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
    return f"{why}; it takes room until you do"
