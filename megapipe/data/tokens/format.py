"""Megatron-LM's indexed data set, version 1: tokens in a ``.bin``, their positions in an ``.idx``.

All values are little-endian, without padding. The ``.bin`` is the concatenated tokens; the
``.idx``, for S sequences and D-1 documents, is:

  ========= ========= ======================================================
  offset    type      meaning
  ========= ========= ======================================================
  0         9 bytes   ``MMIDIDX`` and two NULs
  9         u64       version, 1
  17        u8        code of the token type
  18        u64       S
  26        u64       D
  34        i32[S]    tokens of each sequence
  34+4S     i64[S]    byte offset of each sequence in the ``.bin``
  34+12S    i64[D]    first sequence of each document, and S at the end
  34+12S+8D i8[S]     modes of multimodal corpora; may be missing, not read
  ========= ========= ======================================================
"""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.errors import DataError

Ids = npt.NDArray[np.integer[Any]]
DTypes = dict[int, np.dtype[Any]]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: DTypes = {
    code: np.dtype(name)
    for code, name in {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
"""Token types by code; codes 6 and 7 are float64 and float32, which tokens never have."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_BELOW = 65500
"""Smallest vocabulary whose tokens are stored as i32 instead of u16 (Megatron-LM's rule)."""
LONGEST_SEQUENCE = 2**31 - 1


class Header(NamedTuple):
    """Sizes that the beginning of an index declares."""

    dtype: np.dtype[Any]
    sequences: int
    """Number of sequences, S."""
    boundaries: int
    """Number of document boundaries, D."""

    @property
    def nbytes(self) -> int:
        """Size of the index in bytes, without modes."""
        return HEADER.size + 12 * self.sequences + 8 * self.boundaries

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self.sequences, self.boundaries)


def unpack(path: Path, content: bytes) -> Header:
    """Parse the header of an index. Raises DataError if the header is invalid or not supported."""
    if len(content) < HEADER.size:
        raise DataError(f"{path} is too short for a token index ({len(content)} bytes)")
    magic, version, code, sequences, boundaries = HEADER.unpack(content[: HEADER.size])
    if magic != MAGIC:
        raise DataError(f"{path} is not a token index: it does not start with MMIDIDX")
    if version != VERSION:
        raise DataError(f"{path} has version {version}; only version {VERSION} can be read")
    if code not in DTYPES:
        raise DataError(
            f"{path} declares token type {code}; known integer types: "
            f"{', '.join(f'{code} ({dtype.name})' for code, dtype in DTYPES.items())}"
        )
    return Header(DTYPES[code], sequences, boundaries)


def token_type(vocab_size: int) -> np.dtype[Any]:
    """Return the type in which token ids are stored for a vocabulary of this size."""
    return np.dtype("<u2" if vocab_size < UINT16_BELOW else "<i4")


def bin_of(prefix: Path) -> Path:
    """Return the path of a token file's ``.bin``."""
    return prefix.with_name(prefix.name + ".bin")


def idx_of(prefix: Path) -> Path:
    """Return the path of a token file's ``.idx``."""
    return prefix.with_name(prefix.name + ".idx")


def without_suffix(path: Path) -> Path:
    """Return the prefix of a token file, from the prefix or the path of one of the two files.
    Raises DataError if the path has no name."""
    if not path.name:
        raise DataError(f"{path}: expected the prefix of a token file, such as data/texts")
    return path.with_name(path.name[:-4]) if path.suffix in (".bin", ".idx") else path
