"""Content of a folder of checkpoints: checkpoints, names of removed ones, and leftovers."""

from megapipe.checkpoint.names import FAILED_PREFIX, REMOVED, STAGING_PREFIX, CheckpointName
from megapipe.checkpoint.storage import StorageLocation, at

_MOST_OF_A_NAME = 1024
"""Maximum bytes of the file ``.removed``."""


def committed(root: StorageLocation) -> list[CheckpointName]:
    """Return the committed checkpoints in `root`, newest first; [] if `root` does not exist.

    The order is by step number and attempt, never by file time. Symbolic links are ignored.
    """
    keys = (CheckpointName.parsed(name) for name in at(root).names())
    return sorted((k for k in keys if k and at(root / k.name).is_checkpoint()), reverse=True)


def leftovers(root: StorageLocation) -> list[StorageLocation]:
    """Return the folders of unfinished saves and half-removed checkpoints. They are garbage, unless
    a save is in progress."""

    def is_one(name: str) -> bool:
        key = CheckpointName.parsed(name)
        marked = key is not None and bool(key.suffix) and not at(root / name).is_checkpoint()
        return marked or name.startswith(STAGING_PREFIX)

    return [root / name for name in at(root).names() if is_one(name)]


def next_name(root: StorageLocation, step: int) -> str:
    """Return a name for a new checkpoint of `step`. The name sorts after all other checkpoints of
    that step. No removed checkpoint has had it, and there is no mark for it."""
    marks = (name.removeprefix(FAILED_PREFIX) for name in at(root).names())
    keys = [*committed(root), *filter(None, map(CheckpointName.parsed, marks))]
    attempts = [key.attempt for key in keys if key.step == step]
    last = last_removed(root)
    if last is not None and step <= last.step:
        attempts.append(last.attempt)
    return CheckpointName(step, max(attempts, default=-1) + 1).name


def last_removed(root: StorageLocation) -> CheckpointName | None:
    """Return the name in the file ``.removed``, which combines the highest step and the highest
    attempt of all removed checkpoints; None if no checkpoint was removed."""
    if REMOVED not in at(root).names():
        return None
    text = at(root / REMOVED).read(_MOST_OF_A_NAME).decode(errors="replace")
    return CheckpointName.parsed(text.strip())


def note_removed(root: StorageLocation, removed: list[CheckpointName]) -> None:
    """Record the names of removed checkpoints in the file ``.removed``, so that they are never
    reused. Raises CheckpointError or OSError."""
    before = last_removed(root)
    keys = removed if before is None else [*removed, before]
    last = CheckpointName(max(key.step for key in keys), max(key.attempt for key in keys))
    if last != before:
        at(root / REMOVED).replace(f"{last.name}\n".encode())
