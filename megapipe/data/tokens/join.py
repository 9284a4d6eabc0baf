"""Documents of some token files, one after another, in another."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens.reader import TokenFile
from megapipe.data.tokens.writer import TokenWriter

AT_ONCE = 2**18
"""Documents that are looked at at a time."""

DocumentFilter = Callable[[int, int], npt.NDArray[np.bool_]]
"""Which of the documents from one number up to another are taken; numbers count through all files.
"""


class Documents(NamedTuple):
    """Some documents of a file that follow one another."""

    file: TokenFile
    first: int
    """Number of the first in its file."""
    last: int
    """Number of the one after the last."""
    number: int
    """Number of the first in all files."""


def documents(prefixes: Sequence[Path]) -> Iterator[Documents]:
    """All documents of the files, some at a time; one file is open at a time."""
    number = 0
    for prefix in prefixes:
        file = TokenFile(prefix)
        for first in range(0, len(file), AT_ONCE):
            last = min(first + AT_ONCE, len(file))
            yield Documents(file, first, last, number)
            number += last - first


def copy(some: Documents, writer: TokenWriter, choice: DocumentFilter | None = None) -> None:
    """Append those of `some` that are chosen, by default all."""
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
    """Append the chosen documents of the files to `writer`. Raises what reading and writing do."""
    for some in documents(prefixes):
        copy(some, writer, choice)


def _copy_run(file: TokenFile, first: int, last: int, writer: TokenWriter) -> None:
    """Append documents first .. last-1."""
    boundaries = file.documents[first : last + 1]
    start, stop = file.starts(boundaries[[0, -1]]).tolist()
    lengths = file.lengths[boundaries[0] : boundaries[-1]]
    for tokens in file.tokens.parts(start, stop):
        writer.write(tokens)
    writer.close_sequences(lengths, np.diff(boundaries))
