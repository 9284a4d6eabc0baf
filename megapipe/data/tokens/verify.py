"""Full check of a token file: every sequence starts where the previous one ends, every id is in the
vocabulary, and every block equals its checksum, if there are checksums."""

from collections.abc import Callable

import numpy as np

from megapipe.data.tokens.reader import TokenFile
from megapipe.errors import DataError

AT_ONCE = 2**20
"""Number of sequences, documents and tokens checked at a time."""


def verify(
    file: TokenFile, vocab_size: int | None = None, step: Callable[[int], None] | None = None
) -> None:
    """Check that sequences are consecutive, documents cover them in order, and ids are in the
    vocabulary.

    Args:
        vocab_size: number of ids, 0 .. vocab_size-1; None: ids are not read.
        step: called with the number of bytes read since its previous call.

    Raises:
        DataError: the file is damaged; the message has the first error and its place.
    """
    _verify_sequences(file)
    _verify_documents(file)
    if vocab_size is not None:
        _verify_ids(file, vocab_size, step or (lambda _: None))


def _verify_sequences(file: TokenFile) -> None:
    end = 0
    for first in range(0, len(file.lengths), AT_ONCE):
        lengths = file.lengths[first : first + AT_ONCE].astype(np.int64)
        negative = lengths < 0
        if negative.any():
            raise DataError(
                f"{file.index_path}: sequence {first + int(negative.argmax())} has a negative "
                "length"
            )
        ends = end + np.cumsum(lengths) * file.tokens.dtype.itemsize
        starts = np.append(end, ends[:-1])
        wrong = file.offsets[first : first + AT_ONCE] != starts
        if wrong.any():
            raise DataError(
                f"{file.index_path}: sequence {first + int(wrong.argmax())} does not start where "
                "the one before ends"
            )
        end = int(ends[-1])


def _verify_documents(file: TokenFile) -> None:
    for first in range(0, len(file), AT_ONCE):
        falls = np.diff(file.documents[first : first + AT_ONCE + 1]) < 0
        if falls.any():
            raise DataError(
                f"{file.index_path}: document {first + int(falls.argmax())} ends before it begins"
            )


def _verify_ids(file: TokenFile, vocab_size: int, step: Callable[[int], None]) -> None:
    for first in range(0, len(file.tokens), AT_ONCE):
        ids = file.read(first, min(first + AT_ONCE, len(file.tokens)))
        if ids.min() < 0 or ids.max() >= vocab_size:
            at = int(((ids < 0) | (ids >= vocab_size)).argmax())
            raise DataError(
                f"token id {ids[at]} at position {first + at} of {file.path} is outside the "
                f"vocabulary (0 to {vocab_size - 1})"
            )
        step(ids.nbytes)
