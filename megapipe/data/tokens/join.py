"""Copying of selected documents from several token files into one token file."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens.reader import TokenFile
from megapipe.data.tokens.writer import TokenWriter

AT_ONCE = 2**18
"""Number of documents processed at a time."""

DocumentFilter = Callable[[int, int], npt.NDArray[np.bool_]]
"""Function of first and last. It returns whether to copy each of the documents first .. last-1,
[last - first]; documents are numbered over all files."""


class Documents(NamedTuple):
    """Consecutive documents of a token file."""

    file: TokenFile
    first: int
    """Number of the first document, counted within its file."""
    last: int
    """Number of the document after the last one, counted within its file."""
    number: int
    """Number of the first document, counted over all files."""


def documents(prefixes: Sequence[Path]) -> Iterator[Documents]:
    """Yield all documents of the files, many at a time; one file is open at a time."""
    number = 0
    for prefix in prefixes:
        file = TokenFile(prefix)
        for first in range(0, len(file), AT_ONCE):
            last = min(first + AT_ONCE, len(file))
            yield Documents(file, first, last, number)
            number += last - first


def copy(some: Documents, writer: TokenWriter, choice: DocumentFilter | None = None) -> None:
    """Append to `writer` the documents of `some` that `choice` selects; default: all."""
    if choice is None:
        runs = [(some.first, some.last)]
    else:
        taken = choice(some.number, some.number + some.last - some.first)
        edges = np.flatnonzero(np.diff(taken, prepend=False, append=False)) + some.first
        runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    for first, last in runs:
        _copy_run(some.file, first, last, writer)


def join(
    prefixes: Sequence[Path], writer: TokenWriter, choice: DocumentFilter | None = None
) -> None:
    """Append the documents that `choice` selects (default: all) from several files to `writer`.
    Raises reading and writing errors."""
    for some in documents(prefixes):
        copy(some, writer, choice)


def _copy_run(file: TokenFile, first: int, last: int, writer: TokenWriter) -> None:
    """Append documents first .. last-1 of a file to `writer`."""
    boundaries = file.documents[first : last + 1]
    start, stop = file.starts(boundaries[[0, -1]]).tolist()
    lengths = file.lengths[boundaries[0] : boundaries[-1]]
    for tokens in file.tokens.parts(start, stop):
        writer.write(tokens)
    writer.close_sequences(lengths, np.diff(boundaries))
