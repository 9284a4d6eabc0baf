"""Which checkpoints a folder has, and what killed saves and removals have left in it."""

from megapipe.checkpoint.names import STAGING_PREFIX, Committed
from megapipe.checkpoint.storage import Place, at


def committed(root: Place) -> list[Committed]:
    """The checkpoint folders in `root` by name, newest first; none if `root` does not exist.

    Order is that of step numbers, never of file times. Symbolic links are passed over.
    """
    keys = (Committed.parsed(name) for name in at(root).names())
    return sorted((k for k in keys if k and at(root / k.name).is_checkpoint()), reverse=True)


def leftovers(root: Place) -> list[Place]:
    """Attempts in `root` that were never finished, and checkpoints that are half removed: of no
    use to anybody if no save is under way."""

    def is_one(name: str) -> bool:
        key = Committed.parsed(name)
        marked = key is not None and bool(key.mark) and not at(root / name).is_checkpoint()
        return marked or name.startswith(STAGING_PREFIX)

    return [root / name for name in at(root).names() if is_one(name)]


def next_name(root: Place, step: int) -> str:
    """A name for a new checkpoint of `step` that sorts after all existing ones of that step."""
    attempts = [key.attempt for key in committed(root) if key.step == step]
    return Committed(step, max(attempts, default=-1) + 1).name
