"""Blocks of attention that ends at documents."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from megapipe.context.documents import Ids, within_documents
from megapipe.context.score_rects import score_rects
from megapipe.context.split import Order, PositionSplit

ROWS = 3


def some_documents(generator: np.random.Generator, length: int) -> Ids:
    """Draw the document number of each position; documents end anywhere, in each row elsewhere."""
    ends = generator.random((ROWS, length)) < 0.25
    return np.cumsum(ends, axis=1, dtype=np.int64)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [(2,), (1, 2)])
def test_what_is_computed(ring: int, order: Order, parts: tuple[int, ...]) -> None:
    """Each score of a query with itself and what comes before it in its document, once; of keys
    that all come before the queries at most one rectangle a row. Also over slices."""
    split = PositionSplit(ring, 1, order)
    lengths = [2 * n * split.multiple for n in parts]
    length, generator = sum(lengths), np.random.default_rng(ring)
    blocks = split.local(lengths, 0).blocks
    for _ in range(5):
        ids = some_documents(generator, length)
        found: Counter[tuple[int, int, int]] = Counter()
        start = 0
        for each in lengths:
            stop = start + each // ring
            for q, k in itertools.product(blocks, repeat=2):
                queries, keys = q.rows(start, stop), k.rows(0, stop)
                for entry in score_rects(queries, keys):
                    inside = list(within_documents([entry], queries, keys, ids))
                    if not entry.causal:
                        assert max(Counter(part.row for part in inside).values(), default=0) <= 1
                    for part in inside:
                        assert part.row is not None
                        at, of = list(queries)[part.queries], list(keys)[part.keys]
                        found.update(
                            (part.row, i, j)
                            for (a, i), (b, j) in itertools.product(enumerate(at), enumerate(of))
                            if not part.causal or b <= a
                        )
            start = stop
        wanted = {
            (row, i, j)
            for row in range(ROWS)
            for i in range(length)
            for j in range(i + 1)
            if ids[row, i] == ids[row, j]
        }
        assert found == Counter(wanted)
