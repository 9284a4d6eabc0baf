"""Rectangles of scores that go to a kernel together."""

from __future__ import annotations

from megapipe.context.packs import ALWAYS, PADDING, joined, most_together, together
from megapipe.context.score_rects import ScoreRect


def square(start: int, stop: int, row: int) -> ScoreRect:
    return ScoreRect(slice(start, stop), slice(start, stop), True, row)


def test_short_ones_of_a_kind() -> None:
    """Up to half of the positions, however many samples there are."""
    full = [ScoreRect(slice(0, 8), slice(8, 16), False, row) for row in range(2)]
    wide, tall = (
        ScoreRect(slice(0, 1), slice(7, 16), False, 2),
        ScoreRect(slice(0, 9), slice(15, 16), False),
    )
    short = [square(0, 8, 0), square(8, 9, 0), square(9, 16, 0)]
    long = square(0, 9, 1)
    found = together([*full, wide, tall, *short, long], 16, 3)
    assert found == [(wide,), (tall,), (long,), tuple(full), tuple(short)]
    assert together([], 16, 3) == []


def test_no_more_together_than_memory_allows() -> None:
    """What is set aside for rectangles is at most as much as for all queries, or that of a few."""
    ones = [square(i, i + 1, 0) for i in range(3 * ALWAYS + 1)]
    assert [len(group) for group in together(ones, len(ones), 1)] == [ALWAYS] * 3 + [1]
    most = most_together(2**16, 2)
    assert most * PADDING == 2 * 2**16
    assert most > ALWAYS


def test_rows_that_follow_each_other() -> None:
    """Rows of queries and of keys that follow each other in one sample are joined."""
    first, second, third = square(0, 3, 0), square(3, 4, 0), square(4, 9, 0)
    assert joined([first, second, third]) == (square(0, 9, 0),)
    assert joined([first, third]) == (first, third)
    assert joined([first, square(3, 4, 1)]) == (first, square(3, 4, 1))
    elsewhere = second._replace(keys=slice(4, 5))
    assert joined([first, elsewhere]) == (first, elsewhere)
    assert joined([first, second._replace(queries=slice(4, 5))])[0] == first
