"""Windows over texts that are longer than a model's context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megapipe.evaluate.scoring import ScoredRow


def windows(ids: Sequence[int], *, first: int, context: int, stride: int) -> Iterator[ScoredRow]:
    """Yield rows that score each of ``ids[first:]`` once, given up to `context` tokens before it.

    The first row scores as many tokens as fit. Each later row ends `stride` tokens later (the last
    row at the end of `ids`) and scores the tokens that earlier rows did not score. Every row except
    the first reads `context` tokens, so a smaller stride gives each token more context::

        context 4, stride 2    ids    0   1   2   3   4   5   6   7   8
                        row 0  reads  0   1   2   3      scores 1   2   3   4
                        row 1  reads  2   3   4   5      scores 5   6
                        row 2  reads  4   5   6   7      scores 7   8
    """
    assert first >= 1
    assert 1 <= stride <= context
    stop = min(context + 1 if first <= context else first + stride, len(ids))
    done = first
    while done < len(ids):
        start = max(0, stop - context - 1)
        yield ScoredRow(ids[start:stop], done - start)
        done, stop = stop, min(stop + stride, len(ids))
