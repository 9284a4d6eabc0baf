"""Where each sample begins in the documents, without walking through them.

Sample k begins kL tokens after the beginning of the first document, and its first token belongs to
the first document that ends behind that place. So the running sum of the lengths, divided by L,
says how many samples begin in each document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_AT_ONCE = 2**16
"""Documents and, on average, rows that are worked on at a time: what a processor's caches hold."""

Numbers = npt.NDArray[np.integer[Any]]


def sample_index(
    lengths: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    sequence_length: int,
    samples: int,
) -> Numbers:
    """The sample index of Megatron-LM, which its compiled `build_sample_idx` finds by a loop.

    A sample is L tokens and the one that follows, which is also the first of the next sample. Rows
    beyond the last sample that is complete, if `samples` asks for such, are the last token of all;
    where the last document is empty that is the place -1 in it.

    Args:
        lengths: tokens of each sequence of a token file [S], none negative.
        documents: sequences in the order in which they are read [n], all of them below S: that is
            not looked at.
        sequence_length: L.
        samples: M.

    Returns:
        [M + 1, 2]: for the first token of each sample, and for the last of the last one, the place
        in `documents` and the place in that document. int32, or int64 for more documents than int32
        can number. Beside it a few MiB are held.
    """
    wide = len(documents) > np.iinfo(np.int32).max
    found = np.empty((samples + 1, 2), "<i8" if wide else "<i4")
    rows = _Rows(found, sequence_length)
    # a block has about as many rows as documents, or fewer
    block = min(max(_AT_ONCE * len(documents) // max(samples, 1), 64), _AT_ONCE)
    for first, ends in _ends(lengths, documents, sequence_length, block):
        rows.write(first, ends)
        if rows.written > samples:
            break  # every row is there
    found[0] = 0  # in the first document, even if that one is empty
    if rows.written <= samples:
        found[rows.written :] = len(documents) - 1, lengths[documents[-1]] - 1
    return found


def _ends(
    lengths: npt.NDArray[np.int32],
    documents: npt.NDArray[np.int32],
    sequence_length: int,
    block: int,
) -> Iterator[tuple[int, Numbers]]:
    """Blocks of n documents: the first one's number, and ends [n + 1] (valid until the next block).

    `ends[i + 1]` is the last token of document i, and `ends[i]` the one before its first, as
    distances from the first token of the last sample that begins before the block.
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
        if ends.min() < 0:  # the first sum that int32 cannot hold is negative
            ends = np.cumsum(part, dtype=np.int64)
        yield first, ends
        rest = int(ends[n]) % sequence_length


class _Rows:
    """The rows of a sample index, written from the first to the last.

    A row differs from the one before by (0, L), and by a jump where another document begins: a
    running sum of these makes all rows. A row of two int32 is one int64 in it, the place in the
    document being the upper half; that is exact, as sums modulo 2^64 are.
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
        """The samples that begin in a block of documents; see :func:`_ends`."""
        begun = ends // ends.dtype.type(self._sequence_length)  # samples before each document's end
        rows = min(int(begun[-1]), self._size - self.written)
        where = np.flatnonzero(begun[1:] != begun[:-1])  # documents in which a sample begins
        before = begun.take(where)
        if rows < begun[-1]:
            where, before = where[before < rows], before[before < rows]
        # sample j of the block, from 1 on, begins at j * L - 1 - ends[i] in document i
        number, place = where + first, -1 - ends.take(where).astype(np.int64)
        values = [number + (place << 32)] if self._packed else [number, place]
        for (column, step), value in zip(self._columns, values, strict=True):
            target = column[self.written : self.written + rows]
            target.fill(step)
            value[1:] -= value[:-1].copy()
            target[before] = value + step
            np.add.accumulate(target, out=target)
        self.written += rows
