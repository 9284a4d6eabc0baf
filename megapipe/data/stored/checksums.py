"""CRC-32 of each block of 64 KiB of a file, stored in a neighbouring file ``.crc`` as ``<u4``.

With checksums a reader knows that it gets what was written, without reading the whole file first: a
block is checked when something in the block is first requested. A block is at most as long as
Linux's read-ahead, so the check causes no further reads.
"""

import hashlib
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.errors import DataError
from megapipe.launch.open_files import reason

BLOCK = 1 << 16
"""Number of bytes that have one checksum; the last block of a file may be shorter."""


def crc_of(path: Path) -> Path:
    """Return the path of a file's checksums: ``train.crc`` for ``train.bin``; for other files
    ``.crc`` is appended to the name."""
    return path.with_name(path.name.removesuffix(".bin") + ".crc")


def write_checksums(path: Path) -> str:
    """Write the checksums of a complete file; return their SHA-256, in hex, which identifies the
    file's content. Raises OSError."""
    found = np.fromiter(_crcs(path), "<u4").tobytes()
    with open(crc_of(path), "wb") as file:
        file.write(found)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(found).hexdigest()


def _crcs(path: Path) -> Iterator[int]:
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield zlib.crc32(block)


class Checksums:
    """Checksums of the blocks of a file of `size` bytes, and which blocks have been compared.

    Raises DataError if the checksum file cannot be read or has the wrong size.

    Attributes:
        content: SHA-256, in hex, of the checksums, which :func:`write_checksums` has returned.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = crc_of(path)
        self._of = path
        self._size = size
        blocks = -(-size // BLOCK)
        try:
            found = self._path.read_bytes()
        except OSError as error:
            raise DataError(f"{self._path}: {reason(error)}") from error
        if len(found) != 4 * blocks:
            raise DataError(
                f"{self._path} has {len(found)} bytes, {blocks} blocks need {4 * blocks}: it or "
                f"{path.name} is damaged"
            )
        self._crcs: npt.NDArray[np.uint32] = np.frombuffer(found, "<u4")
        self.content = hashlib.sha256(found).hexdigest()
        self._checked = bytearray(blocks)
        self._first = self._checked.find(0)
        """First block that has not been compared; -1 if all have been."""

    def unchecked(self, start: int, stop: int) -> tuple[int, int] | None:
        """Return the byte range of the blocks that contain bytes start .. stop-1; None if all these
        blocks have been compared."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self._first < 0 or self._checked.find(0, first, last) < 0:
            return None
        return first * BLOCK, min(last * BLOCK, self._size)

    def all_checked(self, starts: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether all blocks that overlap with the byte ranges have been compared."""
        if self._first < 0:
            return True
        find = self._checked.find
        for start, size in zip(starts, sizes, strict=True):
            if find(0, start // BLOCK, -(-(start + size) // BLOCK)) >= 0:
                return False
        return True

    def check(self, start: int, content: memoryview) -> None:
        """Compare the whole blocks in `content`, which begins at byte `start`. Raises DataError."""
        for at in range(0, len(content), BLOCK):
            number = (start + at) // BLOCK
            block = content[at : at + BLOCK]
            if not self._checked[number] and zlib.crc32(block) != self._crcs[number]:
                raise DataError(
                    f"{self._of} is damaged: bytes {start + at} to {start + at + len(block)} "
                    f"do not match {self._path.name}: restore the file, or remove its cache "
                    "folder and it is rebuilt"
                )
            self._checked[number] = 1
        if self._first >= 0:
            self._first = self._checked.find(0, self._first)
