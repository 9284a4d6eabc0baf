"""CRC-32 of each block of a file, in another file beside it, ``.crc``, as ``<u4``.

So a reader knows that the content is what was written without reading all of it first: a block is
checked when something in it is first asked for. A block is no more than Linux reads ahead, so that
the check costs no further reading.
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
"""Bytes of a block; the last one of a file may be shorter."""


def crc_of(path: Path) -> Path:
    """The file of the checksums: ``train.crc`` of ``train.bin``, and of any other the name with
    ``.crc`` behind it."""
    return path.with_name(path.name.removesuffix(".bin") + ".crc")


def write_checksums(path: Path) -> str:
    """Write the checksums of a file that is complete; their own SHA-256, in hex, which stands for
    its content. Raises OSError."""
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
    """The checksums of a file of `size` bytes, and which of its blocks have been compared.

    Raises DataError if their own file cannot be read or is not of this size.

    Attributes:
        content: what :func:`write_checksums` has returned of them.
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
        """The first block that has not been compared; -1: there is none."""

    def unchecked(self, start: int, stop: int) -> tuple[int, int] | None:
        """The blocks that bytes start .. stop-1 lie in, as bytes too; None if all were checked."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self._first < 0 or self._checked.find(0, first, last) < 0:
            return None
        return first * BLOCK, min(last * BLOCK, self._size)

    def all_checked(self, starts: Sequence[int], sizes: Sequence[int]) -> bool:
        """Whether all blocks have been compared in which some ranges lie."""
        if self._first < 0:
            return True
        find = self._checked.find
        for start, size in zip(starts, sizes, strict=True):
            if find(0, start // BLOCK, -(-(start + size) // BLOCK)) >= 0:
                return False
        return True

    def check(self, start: int, content: memoryview) -> None:
        """Compare whole blocks, which begin at byte `start`. Raises DataError."""
        for at in range(0, len(content), BLOCK):
            number = (start + at) // BLOCK
            block = content[at : at + BLOCK]
            if not self._checked[number] and zlib.crc32(block) != self._crcs[number]:
                raise DataError(
                    f"{self._of} is damaged: bytes {start + at} to {start + at + len(block)} are "
                    f"not what {self._path.name} says of them: restore the file, or remove its "
                    "cache folder to have it made again"
                )
            self._checked[number] = 1
        if self._first >= 0:
            self._first = self._checked.find(0, self._first)
