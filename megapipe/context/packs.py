"""Which rectangles of scores one call of a kernel computes together.

Where attention ends at documents, a block of scores is rectangles: many small ones where documents
are short. A kernel of variable lengths takes all that are causal at once, and all others. It wants
the rows of one rectangle behind those of the other, and where they are not they are copied. So a
rectangle as long as most of a row is computed by itself, as without documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megapipe.context.entries import ScoreRect

PADDING = 128
"""Rows of fp32 that such a kernel's backward sets aside for each rectangle, besides one for each
query."""
ALWAYS = 64
"""So many rectangles go together in any case."""


def most_together(queries: int, samples: int) -> int:
    """How many rectangles of a block go into one call, of `queries` positions in each of the
    samples: so many that what is set aside for them is no more than for all queries."""
    return max(ALWAYS, queries * samples // PADDING)


def together(
    rectangles: Iterable[ScoreRect], queries: int, samples: int
) -> list[tuple[ScoreRect, ...]]:
    """The rectangles of a block by the calls that compute them: those that are all causal, or none,
    and have half of the block's `queries` positions at most on either side, in one or as many as
    :func:`most_together` says; and each of the others in its own."""
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
    """The same rows of queries and of keys in as few slices as there are, in their order."""
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
