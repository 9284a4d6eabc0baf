"""Writing of token files with constant memory."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from megapipe.data.tokens.format import LONGEST_SEQUENCE, Header, Ids, bin_of, idx_of
from megapipe.errors import DataError

PIECE = 2**20
"""Number of tokens, or of sequences in the index, written at a time."""
_CLOSED_AT_ONCE = 4096


class TokenWriter:
    """Writes `prefix`.bin document by document, and `prefix`.idx when closed without an error.

    Lengths and boundaries are in temporary files until the end, when their number is known.

    Args:
        prefix: path of both files without their suffix.
        dtype: type of the tokens, one of :data:`~megapipe.data.tokens.format.DTYPES`.
        vocab_size: upper limit of ids, exclusive; default: any id that `dtype` can hold.

    Attributes:
        documents, sequences, tokens: numbers written so far; complete after closing.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[Any], vocab_size: int | None = None) -> None:
        self.prefix = prefix
        self.dtype = dtype
        largest = int(np.iinfo(dtype).max)
        self.largest = largest if vocab_size is None else min(vocab_size - 1, largest)
        self.documents = 0
        self.sequences = 0
        self.tokens = 0
        self._waiting: list[int] = []
        """Lengths of documents that :meth:`add` has written and that are not counted yet."""
        with ExitStack() as opened:
            self._file = opened.enter_context(open(bin_of(prefix), "wb"))
            self._lengths, self._boundaries = (
                opened.enter_context(tempfile.TemporaryFile(dir=prefix.parent)) for _ in range(2)
            )
            self._opened = opened.pop_all()
        self._boundaries.write(bytes(8))

    def add(self, tokens: Ids) -> None:
        """Append a document: its ids [n] with the EOS token. Raises DataError for a wrong id."""
        self.write(tokens)
        self._waiting.append(tokens.size)
        if len(self._waiting) == _CLOSED_AT_ONCE:
            self._close_waiting()

    def write(self, tokens: Ids) -> None:
        """Append ids [n]; :meth:`close_documents` or :meth:`close_sequences` must follow.

        Raises:
            DataError: an id is outside 0 .. vocab_size-1.
        """
        for first in range(0, tokens.size, PIECE):
            ids = tokens[first : first + PIECE]
            if self._is_outside(ids):
                at = int(((ids < 0) | (ids > self.largest)).argmax())
                raise DataError(
                    f"position {self.tokens + at} for {bin_of(self.prefix)}: token id {ids[at]} is "
                    f"outside the vocabulary (0 to {self.largest})"
                )
            self._file.write(np.ascontiguousarray(ids, self.dtype).data)
            self.tokens += ids.size

    def _is_outside(self, ids: Ids) -> bool:
        """Whether an id is below 0 or above the largest allowed id."""
        limits = np.iinfo(ids.dtype)
        if limits.min < 0 and self.largest <= limits.max:
            # as unsigned, negative numbers are above all others: one pass checks both ends
            return bool(ids.view(f"u{ids.dtype.itemsize}").max() > self.largest)
        return bool(ids.min() < 0 or ids.max() > self.largest)

    def close_documents(self, lengths: Sequence[int]) -> None:
        """Divide the ids written since the last closed document into documents [d]. `lengths`:
        number of ids of each document."""
        self._close_waiting()
        sequences = [-(-length // LONGEST_SEQUENCE) for length in lengths]
        if max(sequences, default=1) == 1 == min(sequences, default=1):
            self.close_sequences(np.asarray(lengths, "<i4"), np.ones(len(lengths), np.int64))
            return
        divided = [
            min(LONGEST_SEQUENCE, length - start)
            for length in lengths
            for start in range(0, length, LONGEST_SEQUENCE)
        ]
        self.close_sequences(np.asarray(divided, "<i4"), np.asarray(sequences))

    def close_sequences(self, lengths: Ids, sequences: Ids) -> None:
        """Divide the ids written since the last closed document into sequences of `lengths` [s]
        ids, and these sequences into documents: document i has `sequences[i]` of them, [d]."""
        self._close_waiting()
        self._lengths.write(lengths.astype("<i4").tobytes())
        ends = self.sequences + np.cumsum(sequences, dtype="<i8")
        self._boundaries.write(ends.tobytes())
        self.sequences += lengths.size
        self.documents += sequences.size

    def _close_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.close_documents(waiting)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._opened:
            if error is None:
                self._close_waiting()
                _sync(self._file)
                self._write_index()

    def _write_index(self) -> None:
        header = Header(self.dtype, self.sequences, self.documents + 1)
        with open(idx_of(self.prefix), "wb") as file:
            file.write(header.pack())
            for part in _parts(self._lengths, "<i4"):
                file.write(part.data)
            begin = 0
            for part in _parts(self._lengths, "<i4"):
                ends = begin + np.cumsum(part, dtype="<i8") * self.dtype.itemsize
                file.write(np.append(np.int64(begin), ends[:-1]).astype("<i8").data)
                begin = int(ends[-1])
            for part in _parts(self._boundaries, "<i8"):
                file.write(part.data)
            _sync(file)


def _parts(file: IO[bytes], kind: str) -> Iterator[Ids]:
    """Yield the numbers stored in a file, many at a time."""
    file.seek(0)
    while content := file.read(PIECE * np.dtype(kind).itemsize):
        yield np.frombuffer(content, kind)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
