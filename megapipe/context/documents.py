"""Blocks of attention that ends at documents.

Documents are intervals of positions. So of a rectangle of scores, all of whose keys come before its
queries, at most one document has some of both: the last keys and the first queries. And of the
positions that a rank holds, those of a document follow each other. No mask is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from megapipe.context.entries import ScoreRect
from megapipe.context.positions import Positions

Ids = npt.NDArray[np.int64]


def within_documents(
    entries: Iterable[ScoreRect], queries: Positions, keys: Positions, ids: Ids
) -> Iterator[ScoreRect]:
    """The parts of `entries` in which query and key are of the same document, of one row each.

    `ids` [rows, positions] are the numbers of the documents, not decreasing along a row.
    """
    of_queries, of_keys = ids[:, list(queries)], ids[:, list(keys)]
    for entry in entries:
        for row in range(len(ids)):
            q, k = of_queries[row, entry.queries], of_keys[row, entry.keys]
            if entry.causal:
                yield from _runs(entry, q, row)
            elif k[-1] == q[0]:
                seeing, seen = int((q == k[-1]).sum()), int((k == k[-1]).sum())
                start, stop = entry.queries.start, entry.keys.stop
                yield ScoreRect(slice(start, start + seeing), slice(stop - seen, stop), False, row)


def _runs(entry: ScoreRect, ids: Ids, row: int) -> Iterator[ScoreRect]:
    """The documents of a square, each a square on the diagonal."""
    ends = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    for a, b in itertools.pairwise(ends):
        q, k = entry.queries.start, entry.keys.start
        yield ScoreRect(slice(q + a, q + b), slice(k + a, k + b), True, row)
