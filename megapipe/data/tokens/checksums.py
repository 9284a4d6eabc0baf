"""CRC-32 of each block of a token file's ``.bin``, in a file beside it, ``.crc``, as ``<u4``.

So a reader knows that the tokens are those that were written without reading all of them first: a
block is checked when something in it is first asked for. A block is what Linux reads ahead for a
page of a mapped file, or less, so that the check costs no further reading.
"""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens.format import bin_of
from megapipe.errors import DataError

BLOCK = 1 << 16
"""Bytes of a block; the last one of a file may be shorter."""


def crc_of(prefix: Path) -> Path:
    """The file of the checksums."""
    return prefix.with_name(prefix.name + ".crc")


def write_checksums(prefix: Path) -> str:
    """Write the checksums of a token file that is complete; their own SHA-256, in hex, which stands
    for all tokens. Raises OSError."""
    found = np.fromiter(_crcs(bin_of(prefix)), "<u4")
    crc_of(prefix).write_bytes(found.tobytes())
    return hashlib.sha256(found.tobytes()).hexdigest()


def _crcs(path: Path) -> Iterator[int]:
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield zlib.crc32(block)


class Checksums:
    """The checksums of a token file of `size` bytes, and which of its blocks have been compared.

    Raises DataError if their file cannot be read or is not of this size.
    """

    def __init__(self, prefix: Path, size: int) -> None:
        self._path = crc_of(prefix)
        self._of = bin_of(prefix)
        self._size = size
        blocks = -(-size // BLOCK)
        try:
            found = self._path.stat().st_size
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror}") from error
        if found != 4 * blocks:
            raise DataError(f"{self._path} has {found} bytes, {blocks} blocks need {4 * blocks}")
        self._crcs: npt.NDArray[np.uint32] = np.fromfile(self._path, "<u4")
        self._checked = bytearray(blocks)

    def unchecked(self, start: int, stop: int) -> tuple[int, int] | None:
        """The blocks that bytes start .. stop-1 lie in, as bytes too; None if all were checked."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self._checked.find(0, first, last) < 0:
            return None
        return first * BLOCK, min(last * BLOCK, self._size)

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
