"""Groups of score rectangles that one kernel call computes.

If attention does not cross documents, the scores between a block of queries and a block of keys are
a set of rectangles, many of them small if documents are short. A variable-length kernel computes
all causal rectangles in one call and all others in a second call. The kernel needs the rows of its
rectangles to be contiguous, so other rows are copied first. A rectangle longer than half of the
block therefore has its own call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megapipe.context.score_rects import ScoreRect

PADDING = 128
"""Number of fp32 rows that a variable-length kernel's backward allocates per rectangle, in addition
to the rectangle's queries."""
ALWAYS = 64
"""Number of rectangles that one call can always take, even if their :data:`PADDING` is large."""


def most_together(queries: int, samples: int) -> int:
    """Return the maximum number of rectangles per kernel call. Their padding is at most `queries *
    samples` rows, the size of the block, unless :data:`ALWAYS` rectangles need more."""
    return max(ALWAYS, queries * samples // PADDING)


def together(
    rectangles: Iterable[ScoreRect], queries: int, samples: int
) -> list[tuple[ScoreRect, ...]]:
    """Group rectangles into kernel calls of at most :func:`most_together` rectangles, either all
    causal or all not. A rectangle with a side longer than half of the block's `queries` rows has
    its own call."""
    alone: list[ScoreRect] = []
    short: dict[bool, list[ScoreRect]] = {False: [], True: []}
    for entry in rectangles:
        here = short[entry.causal] if 2 * max(entry.sizes) <= queries else alone
        here.append(entry)
    most = most_together(queries, samples)
    return [
        *((entry,) for entry in alone),
        *(tuple(each[i : i + most]) for each in short.values() for i in range(0, len(each), most)),
    ]


def joined(entries: Sequence[ScoreRect]) -> tuple[ScoreRect, ...]:
    """Merge each rectangle into the previous one if it belongs to the same sample, and both its
    queries and its keys begin where the queries and keys of the previous rectangle end."""
    found: list[ScoreRect] = []
    for entry in entries:
        last = found[-1] if found else None
        if last is not None and (last.row, last.queries.stop, last.keys.stop) == (
            entry.row,
            entry.queries.start,
            entry.keys.start,
        ):
            found[-1] = last._replace(
                queries=slice(last.queries.start, entry.queries.stop),
                keys=slice(last.keys.start, entry.keys.stop),
            )
        else:
            found.append(entry)
    return tuple(found)
