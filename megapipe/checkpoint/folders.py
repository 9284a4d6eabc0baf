"""Which checkpoints a folder has or had, and what killed saves and removals have left in it."""

from megapipe.checkpoint.names import FAILED_PREFIX, REMOVED, STAGING_PREFIX, CheckpointName
from megapipe.checkpoint.storage import StorageLocation, at

_MOST_OF_A_NAME = 1024
"""Bytes of the file that has one."""


def committed(root: StorageLocation) -> list[CheckpointName]:
    """The checkpoint folders in `root` by name, newest first; none if `root` does not exist.

    Order is that of step numbers, never of file times. Symbolic links are passed over.
    """
    keys = (CheckpointName.parsed(name) for name in at(root).names())
    return sorted((k for k in keys if k and at(root / k.name).is_checkpoint()), reverse=True)


def leftovers(root: StorageLocation) -> list[StorageLocation]:
    """Attempts in `root` that were never finished, and checkpoints that are half removed: of no
    use to anybody if no save is under way."""

    def is_one(name: str) -> bool:
        key = CheckpointName.parsed(name)
        marked = key is not None and bool(key.mark) and not at(root / name).is_checkpoint()
        return marked or name.startswith(STAGING_PREFIX)

    return [root / name for name in at(root).names() if is_one(name)]


def next_name(root: StorageLocation, step: int) -> str:
    """A name for a new checkpoint of `step` that sorts after all existing ones of that step, and
    that no other has had: also where those were removed, or have left no more than a mark."""
    marks = (name.removeprefix(FAILED_PREFIX) for name in at(root).names())
    keys = [*committed(root), *filter(None, map(CheckpointName.parsed, marks))]
    attempts = [key.attempt for key in keys if key.step == step]
    last = last_removed(root)
    if last is not None and step <= last.step:
        attempts.append(last.attempt)
    return CheckpointName(step, max(attempts, default=-1) + 1).name


def last_removed(root: StorageLocation) -> CheckpointName | None:
    """The highest step of the checkpoints that were removed, with the highest attempt of any."""
    if REMOVED not in at(root).names():
        return None
    text = at(root / REMOVED).read(_MOST_OF_A_NAME).decode(errors="replace")
    return CheckpointName.parsed(text.strip())


def note_removed(root: StorageLocation, removed: list[CheckpointName]) -> None:
    """Keep the names of checkpoints from being given again. Raises CheckpointError or OSError."""
    before = last_removed(root)
    keys = removed if before is None else [*removed, before]
    last = CheckpointName(max(key.step for key in keys), max(key.attempt for key in keys))
    if last != before:
        at(root / REMOVED).replace(f"{last.name}\n".encode())
