"""Files that survive a power cut, and reads that only accept ordinary files.

A new file is durable after two fsyncs: of its content, then of its folder. A rename is durable
after an fsync of the parent folder.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megapipe.errors import CheckpointError, StorageError

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Values of errno which prove that a path is not an ordinary file; other values prove nothing."""


@contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it is durable when the ``with`` block ends.

    Raises CheckpointError if the file exists or cannot be written (no space, no permission).
    """
    try:
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror}") from error


def sync_folder(path: Path) -> None:
    """Make the folder's entries (files created, renamed, removed) durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file for unbuffered reading.

    Symbolic links are not followed; pipes and devices are refused without blocking. Raises
    CheckpointError if the file is missing or not ordinary, StorageError if it cannot be read.
    """
    try:
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link, should be an ordinary file")
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise CheckpointError(f"{path} is not an ordinary file")
        with open(handle, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise unread("read", path, error) from error


def unread(doing: str, path: Path, error: OSError) -> CheckpointError:
    """Make the error for a failed read of `path`: CheckpointError if it is certain that there is no
    ordinary file, StorageError if an intact file may be there."""
    kind = CheckpointError if error.errno in _NO_FILE else StorageError
    return kind(f"cannot {doing} {path}: {error.strerror}")


def file_size(path: Path) -> int:
    """Return the size of an ordinary file in bytes, with the errors of :func:`open_regular`."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def read_bounded(path: Path, limit: int) -> bytes:
    """Read an ordinary file of at most `limit` bytes; raises CheckpointError for a larger one."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path} has {size} bytes, at most {limit} are allowed")
        data = bytearray(size)
        if not read_into(file, memoryview(data)):
            raise CheckpointError(f"{path} ends early")
        return bytes(data)


def read_into(file: BinaryIO, buffer: memoryview) -> bool:
    """Fill the buffer from the file's current position; return False if the file ends early."""
    done = 0
    while done < len(buffer):
        count = file.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            return False
        done += count
    return True


def writable_by_others(folder: Path) -> str | None:
    """Return a warning if the folder or a file in it may have been written by users other than this
    user and root; None if not."""
    for path in (folder, *sorted(folder.iterdir())):
        status = path.lstat()
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            return f"{path} may be written by every user"
    return None
