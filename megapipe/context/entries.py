"""The scores to compute between a block of queries and a block of keys, causally."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megapipe.context.positions import Positions


class ScoreRect(NamedTuple):
    """A rectangle of scores: rows of queries and rows of keys, all of them visible, or of a square
    those on and below the diagonal."""

    queries: slice
    keys: slice
    causal: bool
    row: int | None = None
    """Of the samples, the one that it is of; None: all."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows of queries, and of keys."""
        q, k = self.queries, self.keys
        return q.stop - q.start, k.stop - k.start

    @property
    def scores(self) -> int:
        """How many are computed of a sample."""
        q, k = self.sizes
        return q * (q + 1) // 2 if self.causal else q * k


def attention_flops(scores: int, head_dim: int, *, backward: bool) -> int:
    """Count the FLOPs of a kernel that computes so many scores: each takes two products of vectors
    in the forward, and five in the backward, which computes it again."""
    return 2 * (5 if backward else 2) * scores * head_dim


@lru_cache(maxsize=65536)
def score_rects(queries: Positions, keys: Positions) -> tuple[ScoreRect, ...]:
    """The scores of queries that see keys, each position itself and all before it; none twice.

    Two blocks hold the same positions, or none in common; keys may have those of earlier slices
    before them.
    """
    earlier = keys.count - queries.count
    if earlier >= 0 and keys.rows(earlier, keys.count) == queries:
        own = ScoreRect(slice(0, queries.count), slice(earlier, keys.count), causal=True)
        return (*_full(queries, keys.rows(0, earlier)), own)
    if any(run.step > 1 for run in (*queries.runs, *keys.runs)):
        return _striped(queries, keys)
    return tuple(_full(queries, keys))


def _full(queries: Positions, keys: Positions) -> Iterator[ScoreRect]:
    """Runs of keys, each wholly before or after each run of queries: those that the same queries
    see are joined."""
    found: list[ScoreRect] = []
    row = 0
    for run in keys.runs:
        here = slice(row, row + run.length)
        row += run.length
        seeing = sum(each.length for each in queries.runs if each.first > run.last)
        if not seeing:
            continue
        rows = slice(queries.count - seeing, queries.count)
        if found and found[-1].queries == rows and found[-1].keys.stop == here.start:
            found[-1] = found[-1]._replace(keys=slice(found[-1].keys.start, here.stop))
        else:
            found.append(ScoreRect(rows, here, causal=False))
    yield from found


def _striped(queries: Positions, keys: Positions) -> tuple[ScoreRect, ...]:
    """Stripes beside each other: a key of the same row is before the query, or after it."""
    (q,), (k,) = queries.runs, keys.runs
    assert (q.step, q.length) == (k.step, k.length), "stripes of one sequence"
    if k.first < q.first:
        return (ScoreRect(slice(0, q.length), slice(0, k.length), causal=True),)
    if q.length == 1:
        return ()
    return (ScoreRect(slice(1, q.length), slice(0, k.length - 1), causal=True),)
