"""Paths that commands take, and numbers that they print."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.checkpoint.find import OF_A_RUN
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST, POINTER
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.run_lock import RunLock
from megapipe.errors import CheckpointError

A_RUN = "a run folder, or the folder of its checkpoints"
NEWEST = "a checkpoint, or a run folder, whose newest intact one is taken"


def root_of(path: Path) -> Path:
    """The folder that has a run's checkpoints. Raises CheckpointError."""
    for root in (path / OF_A_RUN, path):
        if root.is_dir() and (root != path or committed(root)):
            return root
    raise CheckpointError(f"{path}: no checkpoints there; expected {A_RUN}")


def folders_at(path: Path) -> list[Path]:
    """The checkpoint at a path, or all of a run, oldest first. Raises CheckpointError."""
    if (path / MANIFEST).exists():
        return [path]
    root = root_of(path)
    found = [root / key.name for key in reversed(committed(root))]
    if not found:
        raise CheckpointError(f"{root}: no checkpoints there yet")
    return found


def pointer_of(root: Path) -> str | None:
    """The name that the pointer of a run has; None if there is none that can be read."""
    try:
        return (root / POINTER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Keep jobs out of the run of these checkpoints. Raises LaunchError while one is under way, and
    CheckpointError where nothing can be written."""
    try:
        lock = RunLock(root.parent if root.name == OF_A_RUN else root)
    except OSError as error:
        raise CheckpointError(f"cannot write to {root}: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def written(path: Path) -> str:
    """The local time at which a checkpoint was written, from its manifest."""
    try:
        seconds = (path / MANIFEST).stat().st_mtime
    except OSError:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def layout_of(checkpoint: Checkpoint) -> str:
    """The layout that wrote a checkpoint: dp 2, tp 2, pp 2."""
    return ", ".join(f"{name} {size}" for name, size in checkpoint.manifest.layout.items())


def size_of(nbytes: int) -> str:
    """Bytes as people read them, in powers of ten."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.2f} {unit}"
    return f"{nbytes / 1000:,.1f} kB"
