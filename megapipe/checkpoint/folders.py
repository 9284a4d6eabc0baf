"""Which checkpoints a folder has, and what killed saves and removals have left in it."""

from pathlib import Path

from megapipe.checkpoint.names import STAGING_PREFIX, Committed
from megapipe.checkpoint.storage import at


def committed(root: Path) -> list[Committed]:
    """The checkpoint folders in `root` by name, newest first; none if `root` does not exist.

    Order is that of step numbers, never of file times. Symbolic links are passed over.
    """
    keys = (Committed.parsed(name) for name in at(root).names())
    return sorted((k for k in keys if k and at(root / k.name).is_checkpoint()), reverse=True)


def leftovers(root: Path) -> list[Path]:
    """Attempts in `root` that were never finished, and checkpoints that are half removed: of no
    use to anybody if no save is under way."""
    return [root / name for name in at(root).names() if name.startswith(STAGING_PREFIX)]


def next_name(root: Path, step: int) -> str:
    """A name for a new checkpoint of `step` that sorts after all existing ones of that step."""
    attempts = [key.attempt for key in committed(root) if key.step == step]
    return Committed(step, max(attempts, default=-1) + 1).name
