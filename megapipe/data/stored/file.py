"""Reads of byte ranges of a file; a read succeeds or raises a one-line error.

Reads use ``pread``, not a memory map: if a process touches a page of a mapped file that was
truncated, the signal SIGBUS kills it without a message.
"""

import os
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path

from megapipe.data.stored.checksums import Checksums, crc_of
from megapipe.errors import DataError
from megapipe.launch.open_files import leave_room, reason


class StoredFile:
    """A file that is open for reading. If the file has checksums, every read compares them.

    Raises DataError if the file cannot be opened, or if its checksums belong to another size.

    Attributes:
        size: size in bytes when the file was opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115, for as long as it is read
            self._handle = self._file.fileno()
            self.size = os.fstat(self._handle).st_size
        except OSError as error:
            raise DataError(f"{path}: {reason(error)}") from error
        leave_room(self._handle)
        self._checksums = Checksums(path, self.size) if crc_of(path).exists() else None

    @property
    def content(self) -> str | None:
        """SHA-256, in hex, of the checksums, which identifies all bytes; None without checksums."""
        return None if self._checksums is None else self._checksums.content

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return the bytes start .. stop-1. Raises DataError if the file was truncated, cannot be
        read, or differs from its checksums."""
        blocks = None if self._checksums is None else self._checksums.unchecked(start, stop)
        if self._checksums is None or blocks is None:
            return self._bytes(start, stop)
        first, last = blocks
        content = memoryview(self._bytes(first, last))
        self._checksums.check(first, content)
        return content[start - first : stop - first]

    def read_each(self, starts: Sequence[int], sizes: Sequence[int]) -> bytes:
        """Return `sizes[i]` bytes from each byte `starts[i]` on, concatenated. Raises DataError."""
        if self._checksums is not None and not self._checksums.all_checked(starts, sizes):
            for start, size in zip(starts, sizes, strict=True):
                self.read(start, start + size)
        try:
            content = b"".join(map(os.pread, repeat(self._handle), sizes, starts))
        except OSError as error:
            raise self._unreadable(error) from error
        if len(content) != sum(sizes):  # reading them one by one finds what is wrong
            found = zip(starts, sizes, strict=True)
            return b"".join(self._bytes(start, start + size) for start, size in found)
        return content

    def _bytes(self, start: int, stop: int) -> bytes:
        try:
            content = os.pread(self._handle, stop - start, start)
            while len(content) < stop - start:  # Linux reads at most 2 GiB at a time
                more = os.pread(self._handle, stop - start - len(content), start + len(content))
                if not more:
                    end = os.fstat(self._handle).st_size
                    raise DataError(f"{self.path} ends at byte {end}: was it truncated?")
                content += more
        except OSError as error:
            raise self._unreadable(error) from error
        return content

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"{self.path}: {error.strerror}")
