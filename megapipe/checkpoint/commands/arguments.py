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
from megapipe.checkpoint.storage import StorageLocation, at, place_of
from megapipe.errors import CheckpointError
from megapipe.util.paths import is_folder

A_RUN = "a run folder, or the folder or URL of its checkpoints"
MOST_OF_POINTER = 1024
"""Bytes of the pointer, at most."""
NEWEST = (
    "a checkpoint, or a run folder or that of its checkpoints, whose newest that opens is taken"
)


def place(name: str) -> StorageLocation:
    """A path, or the URL of a folder on object storage. Raises ConfigError or CheckpointError."""
    return place_of(name, what="URL")


def root_of(path: StorageLocation) -> StorageLocation:
    """The folder that has a run's checkpoints. Raises CheckpointError."""
    if isinstance(path, Path) and is_folder(path / OF_A_RUN):
        return path / OF_A_RUN
    if (not isinstance(path, Path) or is_folder(path)) and committed(path):
        return path
    raise CheckpointError(f"{path}: no checkpoints there; expected {A_RUN}")


def folders_at(path: StorageLocation) -> list[StorageLocation]:
    """The checkpoint at a path, or all of a run, oldest first. Raises CheckpointError."""
    if at(path / MANIFEST).exists():
        return [path]
    root = root_of(path)
    found = [root / key.name for key in reversed(committed(root))]
    if not found:
        raise CheckpointError(f"{root}: no checkpoints there yet")
    return found


def pointer_of(root: StorageLocation) -> str | None:
    """The name that the pointer of a run has; None if there is none that can be read."""
    try:
        return at(root / POINTER).read(MOST_OF_POINTER).decode().strip()
    except (CheckpointError, UnicodeDecodeError):
        return None


@contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """Keep jobs out of the run of these checkpoints. Raises ConfigError while one is under way, and
    CheckpointError where nothing can be written."""
    try:
        lock = RunLock(root.parent if root.name == OF_A_RUN else root)
    except OSError as error:
        raise CheckpointError(f"cannot write to {root}: {error.strerror}") from None
    try:
        yield
    except OSError as error:
        where = error.filename2 or error.filename or root
        raise CheckpointError(f"cannot write to {where}: {error.strerror}") from None
    finally:
        lock.release()


def written(path: StorageLocation) -> str:
    """The local time at which a checkpoint was written, from its manifest."""
    seconds = at(path / MANIFEST).modified()
    if seconds is None:
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
