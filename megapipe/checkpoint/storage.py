"""All that checkpoints ask of the place where they are kept.

Writer, reader and retention are written once, against :class:`StoragePath`; :func:`at` gives the
one that fits a place. What differs between the kinds is how an attempt becomes a checkpoint in one
step, and how it ceases to be one.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from megapipe.checkpoint.local import LocalPath
from megapipe.checkpoint.objects import RemotePath
from megapipe.util.paths import user_path
from megapipe.util.retries import LIMIT_S
from megapipe.util.urls import is_remote

StorageLocation = Path | RemotePath
"""Where checkpoints are, or one of them, or a file in it. All have `name`, `parent`, `/`, and are
ordered by name."""
T = TypeVar("T")


class StoragePath(Protocol):
    """A file or a folder of checkpoints. Methods raise CheckpointError, those that change
    something may raise OSError too."""

    # The folder of a run's checkpoints.

    def stage(self, step: int, nbytes: int, name: Callable[[], str]) -> str:
        """Make the folder of an attempt to save `step`, which no other attempt shares; returns its
        name. `name` gives that of the checkpoint. Refuses where `nbytes` have no room."""

    def names(self) -> list[str]:
        """Names of all that is in the folder, sorted; none if it is not there."""

    def sync(self) -> None:
        """Make durable what was created, renamed or removed in the folder."""

    # The folder of a checkpoint, or of an attempt at one.

    def sees_attempt(self) -> bool:
        """Whether this process sees the folder that another has staged."""

    def sizes(self, names: Iterable[str], suffix: str) -> dict[str, int]:
        """Bytes of these files of the folder, and of all others that end in `suffix`."""

    def publish(self, name: Callable[[], str]) -> str:
        """Make a checkpoint of an attempt that has its manifest, durable when this returns; returns
        its name, which `name` gives where the folder has another so far."""

    def is_checkpoint(self) -> bool:
        """Whether this was published, and is not withdrawn."""

    def withdraw(self) -> "StorageLocation":
        """Make this no checkpoint any more, in one step; returns what is left of it, a leftover."""

    def discard(self) -> None:
        """Remove as much of an attempt as can be removed, without an error."""

    def remove(self) -> None:
        """Remove a leftover, a file or a folder with all that is in it."""

    # A file.

    def write(self, fill: Callable[[BinaryIO], T]) -> T:
        """Make a new file of what `fill` writes into it, durable when this returns."""

    def replace(self, data: bytes) -> None:
        """Make a file of `data` in the place of the one that is there, in one step."""

    def open(self, *, until: int | None = None) -> AbstractContextManager[BinaryIO]:
        """Open an ordinary file for reading; with `until`, all that follows up to this byte."""

    @property
    def most_readers(self) -> int:
        """Threads that may read in it at once."""

    def read(self, limit: int) -> bytes:
        """The bytes of an ordinary file of at most `limit` bytes."""

    def exists(self) -> bool:
        """Whether there is such a file."""

    def modified(self) -> float | None:
        """When the file was written, in seconds since 1970; None if that cannot be told."""

    def unlink(self) -> None:
        """Remove the file, if it is there."""


def at(place: StorageLocation) -> StoragePath:
    """The file or folder at a place."""
    return LocalPath(place) if isinstance(place, Path) else place


def place_of(name: str, *, what: str, patience_s: float = LIMIT_S) -> StorageLocation:
    """The place that a user names, by a path or a URL, as `what`; nothing is opened there.

    Requests to a store are repeated for `patience_s` (:mod:`megapipe.util.retries`). Raises
    ConfigError or CheckpointError for a URL that cannot be used.
    """
    if is_remote(name):
        return RemotePath.of(name, what=what, patience_s=patience_s)
    return user_path(name)
