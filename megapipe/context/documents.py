"""Rectangles of scores for attention that does not cross documents.

A document is an interval of positions, and its rows on a rank are contiguous. If all keys of a
rectangle come before its queries, at most one document has both keys and queries in it: the
document of the last key and the first query. The scores within documents are then a smaller
rectangle, which needs no mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from megapipe.context.positions import Positions
from megapipe.context.score_rects import ScoreRect

Ids = npt.NDArray[np.int64]


def within_documents(
    entries: Iterable[ScoreRect], queries: Positions, keys: Positions, ids: Ids
) -> Iterator[ScoreRect]:
    """Cut each rectangle of `entries` to scores within documents; yield what remains per sample.

    `ids` [samples, positions] has each position's document number, never decreasing along a sample.
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
    """Split the causal square `entry` of sample `row` into one causal square per document."""
    ends = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    for a, b in itertools.pairwise(ends):
        q, k = entry.queries.start, entry.keys.start
        yield ScoreRect(slice(q + a, q + b), slice(k + a, k + b), True, row)
