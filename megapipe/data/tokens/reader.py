"""Reading of token files: only the requested ranges of tokens and of the index are read."""

import operator
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megapipe.data.stored import StoredArray, StoredFile
from megapipe.data.tokens.format import HEADER, Header, Ids, bin_of, idx_of, unpack
from megapipe.errors import DataError
from megapipe.launch.open_files import reason

_AT_ONCE = 2**20
"""Number of documents whose lengths are computed at a time."""


class TokenFile:
    """A token file, opened after a check of both files' sizes and of the index's first and last
    entries.

    A process loads only what it requests, and the processes of a node share the page cache. Only
    :mod:`megapipe.data.tokens.verify` checks the other entries.

    Attributes:
        tokens: all ids of the file as one stream [T], in the file's own type.
        lengths: number of tokens of each sequence [S].
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
        index, at = StoredFile(self.index_path), HEADER.size
        index.read(0, at)  # compares the header with its checksum
        self.lengths = StoredArray(index, "<i4", at, (sequences,))
        self.offsets = StoredArray(index, "<i8", at + 4 * sequences, (sequences,))
        self.documents = StoredArray(index, "<i8", at + 12 * sequences, (header.boundaries,))
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
        length = size // header.dtype.itemsize
        self.tokens = StoredArray(StoredFile(self.path), header.dtype, 0, (length,))

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents) - 1

    @property
    def contents(self) -> tuple[str | None, str | None]:
        """SHA-256, in hex, of all bytes of the ``.bin`` and of the ``.idx``; None for a file
        without checksums."""
        return self.tokens.file.content, self.lengths.file.content

    def read(self, start: int, stop: int) -> Ids:
        """Return the tokens start .. stop-1 [stop - start], after a comparison with checksums, if
        any.

        Raises:
            DataError: there are no such tokens, the file was truncated, or a checksum differs.
        """
        if not 0 <= start <= stop <= len(self.tokens):
            raise self._outside()
        size = self.tokens.itemsize
        return np.frombuffer(self.tokens.file.read(start * size, stop * size), self.tokens.dtype)

    def read_runs(self, starts: Sequence[int], counts: Sequence[int]) -> Ids:
        """Return `counts[i]` tokens from each `starts[i]` on, concatenated. Raises DataError."""
        size = self.tokens.itemsize
        ends = map(operator.add, starts, counts)
        if min(starts) < 0 or min(counts) < 0 or max(ends) > len(self.tokens):
            raise self._outside()
        bytes_of = [start * size for start in starts], [count * size for count in counts]
        return np.frombuffer(self.tokens.file.read_each(*bytes_of), self.tokens.dtype)

    def _outside(self) -> DataError:
        return DataError(f"{self.index_path} is damaged: it names tokens outside {self.path}")

    def starts(self, boundaries: Ids) -> npt.NDArray[np.int64]:
        """Return the position of the first token of each sequence in `boundaries` [n], values 0 ..
        S. Raises DataError if the index has no such sequence, or a position outside the file."""
        if len(boundaries) and not 0 <= boundaries.min() <= boundaries.max() <= len(self.lengths):
            raise self._lacks()
        starts = np.full(len(boundaries), len(self.tokens), np.int64)
        inside = boundaries < len(self.lengths)
        starts[inside] = self.offsets[boundaries[inside]] // self.tokens.dtype.itemsize
        if len(starts) and not 0 <= starts.min() <= starts.max() <= len(self.tokens):
            raise DataError(f"{self.index_path} is damaged: a sequence is outside {self.path}")
        return starts

    def spans(self, sequences: Ids) -> tuple[list[int], list[int]]:
        """Return, for each sequence in `sequences` [n], the position of its first token and its
        number of tokens. A sequence ends where the next begins. Raises DataError if the index has
        no such sequence, or a position outside the file."""
        listed, last = sequences.tolist(), len(self.lengths) - 1
        if not 0 <= min(listed) <= max(listed) <= last:
            raise self._lacks()
        if last in listed:  # the last sequence has no next one
            starts, stops = (self.starts(some).tolist() for some in (sequences, sequences + 1))
        else:
            size = self.tokens.itemsize
            starts, stops = ([at // size for at in some] for some in self.offsets.pairs(sequences))
        return starts, [stop - start for start, stop in zip(starts, stops, strict=True)]

    def _lacks(self) -> DataError:
        return DataError(f"{self.index_path} is damaged: a document has sequences that it lacks")

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the number of tokens of each document, in arrays [n]. Raises DataError."""
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


def _file_size(path: Path) -> int:
    """Return a file's size in bytes. Raises DataError unless it is regular and readable."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise DataError(f"token file {path}: not a regular file")
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"token file {path}: {reason(error)}") from error
    return status.st_size
