"""Token files: the tokens of a corpus in a ``.bin``, the places of its documents in an ``.idx``.

The format is Megatron-LM's indexed data set, version 1, little-endian, no padding. The ``.bin`` is
the concatenated tokens; the ``.idx``, for S sequences and D-1 documents, is:

======== ========= ======================================================
offset   type      meaning
======== ========= ======================================================
0        9 bytes   ``MMIDIDX`` and two NULs
9        u64       version, 1
17       u8        code of the token type
18       u64       S
26       u64       D
34       i32[S]    tokens of each sequence
34+4S    i64[S]    byte offset of each sequence in the ``.bin``
34+12S   i64[D]    first sequence of each document, and S at the end
34+12S+8D i8[S]    modes of multimodal corpora; may be missing, not read
======== ========= ======================================================
"""

import os
import stat
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.tokenizer import TokenIds
from megapipe.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_UINT16_BELOW = 65500
"""Vocabularies smaller than this are stored as u16, others as i32 (Megatron-LM's rule)."""
_LONGEST_SEQUENCE = 2**31 - 1
_CHECKED_AT_ONCE = 2**18
"""Sequences of an index that are checked at a time."""


class TokenWriter:
    """Writes `prefix`.bin document by document, and `prefix`.idx when closed without an error.

    Args:
        prefix: path of both files without their suffix.
        vocab_size: ids must be below it; it also decides the token type.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.dtype = np.dtype("<u2" if vocab_size < _UINT16_BELOW else "<i4")
        self.tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._file = open(_bin(prefix), "wb")  # noqa: SIM115

    @property
    def documents(self) -> int:
        return len(self._documents) - 1

    def add(self, tokens: TokenIds) -> None:
        """Appends one document, [n] ids including its end mark.

        Raises:
            DataError: an id is outside 0 .. vocab_size-1.
        """
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocab_size):
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            raise DataError(
                f"document {self.documents} for {_bin(self.prefix)}: token id {wrong} is outside "
                f"the vocabulary (0 to {self.vocab_size - 1})"
            )
        self._file.write(tokens.astype(self.dtype).tobytes())
        for start in range(0, tokens.size, _LONGEST_SEQUENCE):
            self._lengths.append(min(_LONGEST_SEQUENCE, tokens.size - start))
        self._documents.append(len(self._lengths))
        self.tokens += tokens.size

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._file:
            if error is not None:
                return
            _sync(self._file)
        lengths = np.frombuffer(self._lengths, dtype=np.intc).astype("<i4")
        with open(_idx(self.prefix), "wb") as file:
            file.write(
                _HEADER.pack(
                    _MAGIC, _VERSION, _CODES[self.dtype], len(lengths), len(self._documents)
                )
            )
            file.write(lengths.tobytes())
            file.write(_offsets(lengths, self.dtype.itemsize).tobytes())
            file.write(np.asarray(self._documents, dtype="<i8").tobytes())
            _sync(file)


class TokenFile:
    """Reads a token file through memory maps, after checking that its two parts fit together.

    A process loads only the pages that it touches, and the processes of a node share them.

    Attributes:
        tokens: all ids of the file as one stream [T], in the file's own type.
        lengths: tokens of each sequence [S].
        documents: first sequence of each document, and S at the end [documents + 1].

    Raises:
        DataError: a file is missing, unreadable, damaged, empty, or contradicts the other.
    """

    def __init__(self, prefix: Path) -> None:
        self.path = _bin(prefix)
        index_path = _idx(prefix)
        dtype, self.lengths, offsets, self.documents = _map_index(index_path)
        declared = _check_index(index_path, self.lengths, offsets, self.documents, dtype.itemsize)
        size = _file_size(self.path)
        if size != declared:
            raise DataError(f"{self.path} has {size} bytes, {index_path} declares {declared}")
        if not size:
            raise DataError(f"{self.path} holds no tokens")
        self.tokens: npt.NDArray[Any] = np.memmap(self.path, dtype=dtype, mode="r")


Ids = npt.NDArray[np.integer[Any]]


def _map_index(path: Path) -> tuple[np.dtype[Any], Ids, Ids, Ids]:
    """Token type, lengths [S], byte offsets [S] and documents [D] of an index."""
    size = _file_size(path)
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise DataError(f"{path} is too short for a token index ({size} bytes)")
        magic, version, code, sequences, boundaries = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise DataError(f"{path} is no token index: it does not start with MMIDIDX")
        if version != _VERSION:
            raise DataError(f"{path} has version {version}; only version {_VERSION} can be read")
        if code not in _DTYPES:
            raise DataError(
                f"{path} declares token type {code}; known integer types: "
                f"{', '.join(f'{c} ({np.dtype(d).name})' for c, d in _DTYPES.items())}"
            )
        dtype = np.dtype(_DTYPES[code])
        declared = _HEADER.size + 12 * sequences + 8 * boundaries
        if size not in (declared, declared + sequences):  # without or with modes
            raise DataError(
                f"{path} has {size} bytes, its header declares {declared} "
                f"({sequences} sequences, {boundaries} document boundaries)"
            )
    lengths = _map(path, "<i4", _HEADER.size, sequences)
    offsets = _map(path, "<i8", _HEADER.size + 4 * sequences, sequences)
    documents = _map(path, "<i8", _HEADER.size + 12 * sequences, boundaries)
    return dtype, lengths, offsets, documents


def _map(path: Path, kind: str, offset: int, count: int) -> Ids:
    if not count:  # nothing cannot be mapped
        return np.empty(0, kind)
    return np.memmap(path, kind, "r", offset, (count,))


def _check_index(path: Path, lengths: Ids, offsets: Ids, documents: Ids, itemsize: int) -> int:
    """Check that sequences follow one another and documents cover them; returns their bytes."""
    end = 0
    for first in range(0, len(lengths), _CHECKED_AT_ONCE):
        part = slice(first, first + _CHECKED_AT_ONCE)
        negative = lengths[part] < 0
        if negative.any():
            raise DataError(
                f"{path}: sequence {first + int(negative.argmax())} has a negative length"
            )
        wrong = offsets[part] != end + _offsets(lengths[part], itemsize)
        if wrong.any():
            raise DataError(
                f"{path}: sequence {first + int(wrong.argmax())} does not start where the one "
                "before ends"
            )
        end += int(lengths[part].sum(dtype=np.int64)) * itemsize
    ordered = all(
        (np.diff(documents[first : first + _CHECKED_AT_ONCE + 1]) >= 0).all()
        for first in range(0, len(documents), _CHECKED_AT_ONCE)
    )
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != len(lengths) or not ordered:
        raise DataError(
            f"{path}: document boundaries do not run from 0 to {len(lengths)} sequences"
        )
    return end


def _offsets(lengths: npt.NDArray[Any], itemsize: int) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence when they follow one another [S]."""
    ends = np.cumsum(lengths, dtype="<i8") * itemsize
    return ends - lengths.astype("<i8") * itemsize


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


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _bin(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def _idx(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")
