"""Removing what is no longer needed: old checkpoints, and what killed saves left behind."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from megapipe.checkpoint.folders import leftovers
from megapipe.checkpoint.storage import at


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
            at(path).withdraw()
            removed.append(path)
        except OSError as error:
            problems.append(_cannot(path, error))
    if removed:
        try:
            at(root).sync()
        except OSError as error:
            problems.append(_cannot(root, error))
    return Removal(removed, problems + clear_leftovers(root).problems)


def clear_leftovers(root: Path) -> Removal:
    """Remove what killed saves and removals left in `root`, if it is there, as :func:`remove`."""
    removed: list[Path] = []
    problems: list[str] = []
    try:
        found = leftovers(root)
    except OSError:  # whoever looks for checkpoints there says so
        found = []
    for leftover in found:
        try:
            at(leftover).remove()
            removed.append(leftover)
        except OSError as error:
            problems.append(_cannot(leftover, error))
    return Removal(removed, problems)


def _cannot(path: Path, error: OSError) -> str:
    return f"cannot remove {error.filename or path}: {error.strerror}; it takes room until you do"
