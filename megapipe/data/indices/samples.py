"""Where each sample begins in the documents, without a loop over samples.

Sample k begins kL tokens after the beginning of the first document. The sample's first token
belongs to the first document that ends after that position. So the cumulative sum of the documents'
lengths, divided by L, tells how many samples begin before the end of each document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_AT_ONCE = 2**16
"""Maximum number of documents, and of index rows on average, that are processed at a time, to fit
into CPU caches."""

Numbers = npt.NDArray[np.integer[Any]]


def sample_index(
    lengths: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    sequence_length: int,
    samples: int,
) -> Numbers:
    """Return the sample index that Megatron-LM's compiled loop `build_sample_idx` computes.

    A sample has L tokens and the next token, which is also the first token of the next sample. If
    `samples` exceeds the number of complete samples, every further row is the last token of the
    last document, or token -1 if that document is empty.

    Args:
        lengths: tokens of each sequence of a token file [S], none negative.
        documents: sequences in reading order [n], each below S (not checked).
        sequence_length: L.
        samples: M.

    Returns:
        [M + 1, 2]: index in `documents` and token in that document, for the first token of each
            sample and the last token of the last sample. The type is int32, or int64 if int32
            cannot number the documents. The computation takes a few MiB more.
    """
    wide = len(documents) > np.iinfo(np.int32).max
    found = np.empty((samples + 1, 2), "<i8" if wide else "<i4")
    rows = _Rows(found, sequence_length)
    # a block has at most about as many rows as documents
    block = min(max(_AT_ONCE * len(documents) // max(samples, 1), 64), _AT_ONCE)
    for first, ends in _ends(lengths, documents, sequence_length, block):
        rows.write(first, ends)
        if rows.written > samples:
            break  # every row is there
    found[0] = 0  # in the first document, even if it is empty
    if rows.written <= samples:
        found[rows.written :] = len(documents) - 1, lengths[documents[-1]] - 1
    return found


def _ends(
    lengths: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    sequence_length: int,
    block: int,
) -> Iterator[tuple[int, Numbers]]:
    """Yield, for each block of n documents, the number of its first document, and `ends` [n + 1].
    The array `ends` is valid until the next block.

    Positions are counted from the first token of the last sample that begins before the block.
    `ends[i]` is the token before the block's document i, and `ends[i + 1]` its last token.
    """
    taken, narrow = np.empty(block + 1, np.int32), np.empty(block + 1, np.int32)
    rest = sequence_length - 1  # before the first document, as if sample -1 had just been read
    for first in range(0, len(documents), block):
        numbers = documents[first : first + block]
        n = len(numbers)
        part = taken[: n + 1]
        lengths.take(numbers, mode="clip", out=part[1:])  # other modes would use another buffer
        part[0] = rest
        ends: Numbers = np.add.accumulate(part, dtype=np.int32, out=narrow[: n + 1])
        if ends.min() < 0:  # the first sum that overflows int32 is negative
            ends = np.cumsum(part, dtype=np.int64)
        yield first, ends
        rest = int(ends[n]) % sequence_length


class _Rows:
    """The rows of a sample index, written from the first to the last.

    A row differs from the row before by (0, L), and by a jump if another document begins: the
    cumulative sum of the differences gives all rows. Rows of two int32 are summed as one int64
    each, with the position in the document as its upper half. The sum is exact, since int64 sums
    are modulo 2^64.
    """

    def __init__(self, found: Numbers, sequence_length: int) -> None:
        self.written = 0
        self._size = len(found)
        self._sequence_length = sequence_length
        self._packed = found.dtype == np.dtype("<i4")
        if self._packed:
            self._columns = [(found.view("<i8")[:, 0], sequence_length << 32)]
        else:
            self._columns = [(found[:, 0], 0), (found[:, 1], sequence_length)]

    def write(self, first: int, ends: Numbers) -> None:
        """Write the samples that begin in a block of documents; see :func:`_ends`."""
        begun = ends // ends.dtype.type(self._sequence_length)  # samples before each document's end
        rows = min(int(begun[-1]), self._size - self.written)
        starters = np.flatnonzero(begun[1:] != begun[:-1])  # documents in which a sample begins
        before = begun.take(starters)
        if rows < begun[-1]:
            starters, before = starters[before < rows], before[before < rows]
        # sample j of the block, from 1 on, begins at j * L - 1 - ends[i] in document i
        number, offset = starters + first, -1 - ends.take(starters).astype(np.int64)
        values = [number + (offset << 32)] if self._packed else [number, offset]
        for (column, step), value in zip(self._columns, values, strict=True):
            target = column[self.written : self.written + rows]
            target.fill(step)
            value[1:] -= value[:-1].copy()
            target[before] = value + step
            np.add.accumulate(target, out=target)
        self.written += rows
