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
"""Documents that are worked on at a time, and rows on average: what a processor's caches hold."""
_ROWS = 2 * _AT_ONCE
"""Rows that are written at a time."""
_FEW = 8
"""With fewer than one row in so many documents it is faster to search for each row's document."""

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
        documents: sequences in the order in which they are read [n].
        sequence_length: L.
        samples: M.

    Returns:
        [M + 1, 2]: for the first token of each sample, and for the last of the last one, the place
        in `documents` and the place in that document. int32, or int64 for more documents than int32
        can number. Beside it a few MiB are held.

    Raises:
        IndexError: a document is none of the S sequences.
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
        if numbers.min() < 0 or numbers.max() >= len(lengths):
            raise IndexError(f"a document that is none of {len(lengths)} sequences")
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

    A row of two int32 is written as one int64, the place in the document in its upper half: half as
    many operations. All is modulo 2^64, so halves that are out of range on the way do no harm.
    """

    def __init__(self, found: Numbers, sequence_length: int) -> None:
        self.written = 0
        self._size = len(found)
        self._sequence_length = sequence_length
        steps = np.arange(1, _ROWS + 1, dtype=np.int64) * sequence_length
        self._packed = found.dtype == np.dtype("<i4")
        if self._packed:
            self._columns = [(found.view("<i8")[:, 0], steps << 32)]
        else:
            self._columns = [(found[:, 0], np.zeros_like(steps)), (found[:, 1], steps)]

    def write(self, first: int, ends: Numbers) -> None:
        """The samples that begin in a block of documents; see :func:`_ends`."""
        where, edges = _begun(ends, self._sequence_length)
        # sample j of the block, from 1 on, begins at j * L - 1 - ends[i] in document i
        number, place = where + first, -1 - ends.take(where).astype(np.int64)
        values = [number + (place << 32)] if self._packed else [number, place]
        rows = min(int(ends[-1]) // self._sequence_length, self._size - self.written)
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            for (column, steps), value in zip(self._columns, values, strict=True):
                if edges is None:
                    part = value[start:stop]
                else:
                    part = value.repeat(np.diff(edges.clip(start, stop)))
                target = column[self.written + start : self.written + stop]
                np.add(part, steps[: stop - start], out=target)
                if start:
                    target += start * steps[:1]
        self.written += rows


def _begun(ends: Numbers, sequence_length: int) -> tuple[npt.NDArray[np.intp], Numbers | None]:
    """The documents of a block in which samples begin [m], and how many samples begin before each
    of them and in all [m + 1]; None if it is one sample for each of the m."""
    rows = int(ends[-1]) // sequence_length
    if rows < len(ends) // _FEW:
        places = np.arange(1, rows + 1, dtype=ends.dtype) * ends.dtype.type(sequence_length)
        return np.searchsorted(ends[1:], places), None
    begun = ends // ends.dtype.type(sequence_length)
    where = np.flatnonzero(begun[1:] != begun[:-1])
    if len(where) == rows:
        return where, None
    return where, begun.take(np.append(where, len(begun) - 1))
