"""Checkpoints in folders of a file system: fsync makes them durable, one rename commits them."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from megapipe.checkpoint.durable import (
    create,
    file_size,
    open_regular,
    read_bounded,
    sync_folder,
    unread,
)
from megapipe.checkpoint.names import STAGING_PREFIX
from megapipe.errors import CheckpointError
from megapipe.util.paths import exists, is_folder

T = TypeVar("T")


@dataclass(frozen=True)
class LocalPath:
    """A file or a folder of a file system, which need not exist. It has the operations of
    :class:`~megapipe.checkpoint.storage.StoragePath`."""

    path: Path
    most_readers = 4

    def stage(self, step: int, nbytes: int, name: Callable[[], str]) -> str:
        """Make a staging folder with a temporary name; `publish` renames it."""
        if not self.path.is_dir():
            self.path.mkdir(parents=True)
            sync_folder(self.path.parent)
        free = shutil.disk_usage(self.path).free
        if free < nbytes:
            raise CheckpointError(
                f"{self.path} has {free / 1e9:.3g} GB free, {nbytes / 1e9:.3g} GB are to be "
                "written: remove what is not needed, or set run.folder to a larger disk"
            )
        staging = self._new(f"{step:08d}")
        staging.mkdir()
        return staging.name

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unread("list", self.path, error) from error

    def sync(self) -> None:
        sync_folder(self.path)

    def sees_attempt(self) -> bool:
        return self.path.is_dir()

    def sizes(self, names: Iterable[str], suffix: str) -> dict[str, int]:
        try:
            files = [entry for entry in os.scandir(self.path) if entry.name.endswith(suffix)]
            found = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in files}
        except OSError as error:
            raise unread("list", self.path, error) from error
        return found | {name: file_size(self.path / name) for name in names}

    def publish(self, name: Callable[[], str]) -> str:
        root, final = self.path.parent, name()
        os.rename(self.path, root / final)
        sync_folder(root)
        return final

    def is_checkpoint(self) -> bool:
        return is_folder(self.path) and not self.path.is_symlink()

    def withdraw(self) -> Path:
        left = LocalPath(self.path.parent)._new("removed")
        os.rename(self.path, left)
        return left

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        else:
            self.path.unlink()

    def write(self, fill: Callable[[BinaryIO], T]) -> T:
        with create(self.path) as file:
            return fill(file)

    def replace(self, data: bytes) -> None:
        root = self.path.parent
        new = LocalPath(root)._new(self.path.name)
        with create(new) as file:
            file.write(data)
        os.replace(new, self.path)
        sync_folder(root)

    def open(self, *, until: int | None = None) -> AbstractContextManager[BinaryIO]:
        return open_regular(self.path)

    def read(self, limit: int) -> bytes:
        return read_bounded(self.path, limit)

    def exists(self) -> bool:
        return exists(self.path)

    def modified(self) -> float | None:
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)

    def _new(self, what: str) -> Path:
        """Return a path in this folder that does not exist, with a random name for staging."""
        return self.path / f"{STAGING_PREFIX}{what}-{secrets.token_hex(8)}"
