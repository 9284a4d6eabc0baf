"""Paths that the checkpoint commands accept, and how they print times, layouts and sizes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megapipe.checkpoint.find import OF_A_RUN
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST, POINTER
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.run_lock import RunLock
from megapipe.checkpoint.storage import StorageLocation, at, location_of
from megapipe.errors import CheckpointError
from megapipe.util.paths import is_folder

A_RUN = "a run folder, or the folder or URL of its checkpoints"
MOST_OF_POINTER = 1024
"""Maximum bytes of the pointer file ``latest``."""
NEWEST = "a checkpoint; or a run folder or its checkpoints folder, for the newest readable one"


def location(name: str) -> StorageLocation:
    """Parse a path or an object-storage URL. Raises ConfigError or CheckpointError."""
    return location_of(name, what="URL")


def root_of(path: StorageLocation) -> StorageLocation:
    """Return the folder that holds a run's checkpoints: the subfolder ``checkpoints`` of `path`, or
    `path` itself. Raises CheckpointError if there are no checkpoints."""
    if isinstance(path, Path) and is_folder(path / OF_A_RUN):
        return path / OF_A_RUN
    if (not isinstance(path, Path) or is_folder(path)) and committed(path):
        return path
    raise CheckpointError(f"{path} has no checkpoints: expected {A_RUN}")


def folders_at(path: StorageLocation) -> list[StorageLocation]:
    """Return the checkpoint at `path`, or all checkpoints of the run at `path`, oldest first.
    Raises CheckpointError if there are none."""
    if at(path / MANIFEST).exists():
        return [path]
    root = root_of(path)
    found = [root / key.name for key in reversed(committed(root))]
    if not found:
        raise CheckpointError(f"{root} has no checkpoints yet")
    return found


def pointer_of(root: StorageLocation) -> str | None:
    """Return the checkpoint's name in the pointer file ``latest``; None if it is not readable."""
    try:
        return at(root / POINTER).read(MOST_OF_POINTER).decode().strip()
    except (CheckpointError, UnicodeDecodeError):
        return None


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Hold the lock of the run whose checkpoints are in `root`, so that no job of the run starts.
    Raises ConfigError if a job is running, CheckpointError if a file cannot be written."""
    try:
        lock = RunLock(root.parent if root.name == OF_A_RUN else root)
    except OSError as error:
        raise CheckpointError(f"cannot write to {root}: {error.strerror}") from None
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename or root
        raise CheckpointError(f"cannot write to {path}: {error.strerror}") from None
    finally:
        lock.release()


def written(path: StorageLocation) -> str:
    """Return the local time at which a checkpoint's manifest was written; ``-`` if unknown."""
    seconds = at(path / MANIFEST).modified()
    if seconds is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def layout_of(checkpoint: Checkpoint) -> str:
    """Describe the layout that wrote a checkpoint, as in ``dp 2, tp 2, pp 2``."""
    return ", ".join(f"{name} {size}" for name, size in checkpoint.manifest.layout.items())


def size_of(nbytes: int) -> str:
    """Format a number of bytes in GB, MB or kB (powers of ten)."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.2f} {unit}"
    return f"{nbytes / 1000:,.1f} kB"
