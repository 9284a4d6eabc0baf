"""The operations that checkpoints need of their storage.

Writer, reader and retention are written once, against :class:`StoragePath`; :func:`at` returns the
implementation for a location. Kinds of storage differ in how the folder of a save becomes a
checkpoint in one step (a rename, or the write of the manifest), and how a checkpoint becomes a
leftover in one step.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from megapipe.checkpoint.local import LocalPath
from megapipe.checkpoint.object_storage import RemotePath
from megapipe.util.paths import user_path
from megapipe.util.retries import LIMIT_S
from megapipe.util.urls import is_remote

StorageLocation = Path | RemotePath
"""Path of the folder of all checkpoints, of one checkpoint, or of a file in a checkpoint. Locations
have `name`, `parent` and `/`, and are ordered by name."""
T = TypeVar("T")


class StoragePath(Protocol):
    """A file or a folder of checkpoints. Methods raise CheckpointError; methods that change
    something may raise OSError too."""

    # The folder of a run's checkpoints.

    def stage(self, step: int, nbytes: int, name: Callable[[], str]) -> str:
        """Make a staging folder that only this save of `step` uses; return the folder's name.
        `name()` returns the name that the checkpoint shall get. Raises CheckpointError if there is
        no space for `nbytes`."""

    def names(self) -> list[str]:
        """Return the names of everything in the folder, sorted; [] if it does not exist."""

    def sync(self) -> None:
        """Make durable what was created, renamed or removed in the folder."""

    # The folder of a checkpoint, or the staging folder of a save.

    def sees_attempt(self) -> bool:
        """Whether this process sees the staging folder that another process has made."""

    def sizes(self, names: Iterable[str], suffix: str) -> dict[str, int]:
        """Return the sizes in bytes of the files `names` and of all files in the folder whose names
        end with `suffix`. Raises CheckpointError if one of `names` is missing."""

    def publish(self, name: Callable[[], str]) -> str:
        """Turn a staging folder with a manifest into a durable checkpoint, in one step. Return the
        checkpoint's name: the result of `name()`, or on object storage the name of the staging
        folder, which is not renamed."""

    def is_checkpoint(self) -> bool:
        """Whether the folder was published and not withdrawn."""

    def withdraw(self) -> "StorageLocation":
        """Turn a checkpoint into a leftover, in one step; return the leftover."""

    def discard(self) -> None:
        """Remove the staging folder of a failed save as far as possible; raises no error."""

    def remove(self) -> None:
        """Remove a leftover: a file, or a folder with its content."""

    # A file.

    def write(self, fill: Callable[[BinaryIO], T]) -> T:
        """Make a new, durable file with the bytes that `fill` writes."""

    def replace(self, data: bytes) -> None:
        """Set the content of a new or existing file to `data`, in one step."""

    def open(self, *, until: int | None = None) -> AbstractContextManager[BinaryIO]:
        """Open an ordinary file for reading. `until`: the caller reads no byte from this offset
        on, so that requests to a store can be large."""

    @property
    def most_readers(self) -> int:
        """Maximum number of threads that may read from the storage at the same time."""

    def read(self, limit: int) -> bytes:
        """Read an ordinary file. Raises CheckpointError if it has more than `limit` bytes."""

    def exists(self) -> bool:
        """Whether the file exists."""

    def modified(self) -> float | None:
        """Return the time when the file was written, in seconds since 1970; None if unknown."""

    def unlink(self) -> None:
        """Remove the file, if it exists."""


def at(location: StorageLocation) -> StoragePath:
    """Return the object with the storage operations of a location."""
    return LocalPath(location) if isinstance(location, Path) else location


def location_of(name: str, *, what: str, patience_s: float = LIMIT_S) -> StorageLocation:
    """Return the location of a user's path or URL; nothing is opened.

    `what` names the option or configuration key in messages. A failed request to a store is retried
    for `patience_s` seconds (:mod:`megapipe.util.retries`). Raises ConfigError or CheckpointError
    for a URL that cannot be used.
    """
    if is_remote(name):
        return RemotePath.of(name, what=what, patience_s=patience_s)
    return user_path(name)
