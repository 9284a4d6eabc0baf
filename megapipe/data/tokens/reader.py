"""Reads token files: indices through memory maps, tokens by reads that a truncated file fails.

A page of a mapped file that is truncated kills the process that touches it (SIGBUS).
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens.checksums import Checksums, crc_of
from megapipe.data.tokens.format import HEADER, Header, Ids, bin_of, idx_of, unpack
from megapipe.errors import DataError

_AT_ONCE = 2**20


class TokenFile:
    """A token file, after a look at the sizes of its two parts and at the ends of the index.

    A process loads only what it asks for, and the processes of a node share it in memory. What is
    between the ends is for :mod:`megapipe.data.tokens.verify` to read.

    Attributes:
        tokens: all ids of the file as one stream [T], in the file's own type; :meth:`read` to be
            safe from a file that changes.
        lengths: tokens of each sequence [S].
        offsets: byte offset of each sequence [S].
        documents: first sequence of each document, and S at the end [documents + 1].

    Raises:
        DataError: a file is missing, unreadable, damaged, or contradicts the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self.path, self.index_path = bin_of(prefix), idx_of(prefix)
        header = _header(self.index_path)
        sequences = header.sequences
        self.lengths = _map(self.index_path, "<i4", HEADER.size, sequences)
        self.offsets = _map(self.index_path, "<i8", HEADER.size + 4 * sequences, sequences)
        self.documents = _map(
            self.index_path, "<i8", HEADER.size + 12 * sequences, header.boundaries
        )
        if header.boundaries < 1 or self.documents[0] != 0 or self.documents[-1] != sequences:
            raise DataError(
                f"{self.index_path}: document boundaries do not run from 0 to {sequences} sequences"
            )
        declared = 0
        if sequences:
            declared = int(self.offsets[-1]) + int(self.lengths[-1]) * header.dtype.itemsize
        size = _file_size(self.path)
        if size != declared:
            raise DataError(f"{self.path} has {size} bytes, {self.index_path} declares {declared}")
        self.tokens: Ids = _map(self.path, header.dtype, 0, size // header.dtype.itemsize)
        self._dtype, self._length = header.dtype, len(self.tokens)
        self._file = open(self.path, "rb", buffering=0)  # noqa: SIM115, for as long as it is read
        self._checksums = Checksums(prefix, size) if crc_of(prefix).exists() else None

    def __len__(self) -> int:
        """Documents."""
        return len(self.documents) - 1

    def read(self, start: int, stop: int) -> Ids:
        """The tokens start .. stop-1 [stop - start]; where there are checksums, they are compared.

        Raises:
            DataError: there are no such tokens, the file was truncated, or a checksum differs.
        """
        if not 0 <= start <= stop <= self._length:
            raise DataError(f"{self.index_path} is damaged: it names tokens outside {self.path}")
        size = self._dtype.itemsize
        own = start * size, stop * size
        blocks = None if self._checksums is None else self._checksums.unchecked(*own)
        first, last = blocks or own
        content = self._bytes(first, last)
        if self._checksums is not None and blocks is not None:
            self._checksums.check(first, memoryview(content))
        return np.frombuffer(content, self._dtype, stop - start, own[0] - first)

    def _bytes(self, start: int, stop: int) -> bytes:
        """The bytes start .. stop-1 of the tokens."""
        handle = self._file.fileno()
        try:
            content = os.pread(handle, stop - start, start)
            while len(content) < stop - start:  # Linux reads 2 GiB at a time
                more = os.pread(handle, stop - start - len(content), start + len(content))
                if not more:
                    end = os.fstat(handle).st_size
                    raise DataError(f"{self.path} ends at byte {end}: was it truncated?")
                content += more
        except OSError as error:
            raise DataError(f"token file {self.path}: {error.strerror}") from error
        return content

    def starts(self, boundaries: Ids) -> npt.NDArray[np.int64]:
        """The token [n] that each of the sequences [n], of 0 .. S, begins with. Raises DataError if
        the index has no such sequence, or a place outside the file."""
        if len(boundaries) and not 0 <= boundaries.min() <= boundaries.max() <= len(self.lengths):
            raise DataError(f"{self.index_path} is damaged: a document of sequences that it lacks")
        starts = np.full(len(boundaries), len(self.tokens), np.int64)
        inside = boundaries < len(self.lengths)
        starts[inside] = self.offsets[boundaries[inside]] // self.tokens.dtype.itemsize
        if len(starts) and not 0 <= starts.min() <= starts.max() <= len(self.tokens):
            raise DataError(f"{self.index_path} is damaged: a sequence outside {self.path}")
        return starts

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of each document, some documents at a time [n]. Raises as :meth:`starts`."""
        for first in range(0, len(self), _AT_ONCE):
            yield np.diff(self.starts(self.documents[first : first + _AT_ONCE + 1]))


def _header(path: Path) -> Header:
    size = _file_size(path)
    with open(path, "rb") as file:
        header = unpack(path, file.read(HEADER.size))
    if size not in (header.nbytes, header.nbytes + header.sequences):  # without or with modes
        raise DataError(
            f"{path} has {size} bytes, its header declares {header.nbytes} "
            f"({header.sequences} sequences, {header.boundaries} document boundaries)"
        )
    return header


def _map(path: Path, kind: str | np.dtype[Any], offset: int, count: int) -> Ids:
    if not count:  # nothing cannot be mapped
        return np.empty(0, kind)
    return np.memmap(path, kind, "r", offset, (count,))


def _file_size(path: Path) -> int:
    """Bytes of a file that is there, is a file, and may be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise DataError(f"token file {path}: not a regular file")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"token file {path}: {error.strerror}") from error
    return status.st_size
