"""The scores to compute between a block of queries and a block of keys in causal attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megapipe.context.positions import Positions


class ScoreRect(NamedTuple):
    """A rectangle of scores: a range of query rows by a range of key rows. If `causal`, it is a
    square and only scores on and below the diagonal are visible; otherwise all scores are."""

    queries: slice
    keys: slice
    causal: bool
    row: int | None = None
    """Index of the sample that the rectangle belongs to; None: all samples."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of query rows and number of key rows."""
        q, k = self.queries, self.keys
        return q.stop - q.start, k.stop - k.start

    @property
    def scores(self) -> int:
        """Number of scores that are computed per sample."""
        q, k = self.sizes
        return q * (q + 1) // 2 if self.causal else q * k


def attention_flops(scores: int, head_dim: int, *, backward: bool) -> int:
    """Return the FLOPs of an attention kernel for `scores` pairs of query and key. A pair takes two
    dot products in the forward, and five in the backward, which recomputes the scores."""
    return 2 * (5 if backward else 2) * scores * head_dim


@lru_cache(maxsize=65536)
def score_rects(queries: Positions, keys: Positions) -> tuple[ScoreRect, ...]:
    """List the rectangles of scores that causal attention computes between two blocks.

    The two blocks have the same positions, or no position in common. The keys of earlier sequence
    slices can come first in the block of keys. No score is in two rectangles.
    """
    earlier = keys.count - queries.count
    if earlier >= 0 and keys.rows(earlier, keys.count) == queries:
        own = ScoreRect(slice(0, queries.count), slice(earlier, keys.count), causal=True)
        return (*_full(queries, keys.rows(0, earlier)), own)
    if any(run.step > 1 for run in (*queries.runs, *keys.runs)):
        return _striped(queries, keys)
    return tuple(_full(queries, keys))


def _full(queries: Positions, keys: Positions) -> Iterator[ScoreRect]:
    """Yield rectangles without a mask, one per range of keys that some queries see; adjacent ranges
    that the same queries see are merged. Every range of keys must lie entirely before or after
    every range of queries."""
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
    """List the causal rectangle between queries and keys of two different stripes, or nothing if no
    key is visible. If the stripe of the keys comes later, query n sees only keys before key n."""
    (q,), (k,) = queries.runs, keys.runs
    assert (q.step, q.length) == (k.step, k.length), "stripes of one sequence"
    if k.first < q.first:
        return (ScoreRect(slice(0, q.length), slice(0, k.length), causal=True),)
    if q.length == 1:
        return ()
    return (ScoreRect(slice(1, q.length), slice(0, k.length - 1), causal=True),)
