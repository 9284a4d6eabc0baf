"""Which positions ranks hold."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megapipe.context.positions import Positions, StridedRange
from megapipe.context.score_rects import score_rects
from megapipe.context.split import Order, PositionSplit

ORDERS: list[Order] = ["zigzag", "striped", "contiguous"]
SPLITS = [
    PositionSplit(ring, ulysses, order, heads_first)
    for ring, ulysses, order, heads_first in itertools.product(
        (1, 2, 3, 4), (1, 2, 3), ORDERS, (True, False)
    )
]


def some_length(split: PositionSplit) -> int:
    return 3 * split.multiple


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_each_position_is_held_once(split: PositionSplit) -> None:
    length = some_length(split)
    held = [list(split.own(0, length, index)) for index in range(split.cp)]
    assert sorted(itertools.chain(*held)) == list(range(length))
    assert len(set(map(len, held))) == 1
    assert all(each == sorted(each) for each in held)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_parts_of_those_who_split_heads_are_the_block_when_joined(split: PositionSplit) -> None:
    length = some_length(split)
    places = [split.coordinates(index) for index in range(split.cp)]
    assert sorted(places) == list(itertools.product(range(split.ring), range(split.ulysses)))
    for ring in range(split.ring):
        indices = [split.index(ring, j) for j in range(split.ulysses)]
        joined = [p for index in indices for p in split.own(5, length, index)]
        assert joined == list(split.block(5, length, ring))


def test_which_positions() -> None:
    assert list(PositionSplit(2, 1, "zigzag").own(0, 8, 0)) == [0, 1, 6, 7]
    assert list(PositionSplit(2, 1, "zigzag").own(0, 8, 1)) == [2, 3, 4, 5]
    assert list(PositionSplit(2, 1, "striped").own(8, 6, 1)) == [9, 11, 13]
    assert list(PositionSplit(3, 1, "contiguous").own(0, 6, 2)) == [4, 5]
    assert list(PositionSplit(2, 2, "zigzag").own(0, 8, 1)) == [6, 7]
    assert list(PositionSplit(2, 2, "zigzag", heads_first=False).own(0, 8, 1)) == [2, 3]
    assert list(PositionSplit(1, 4).own(0, 8, 2)) == [4, 5]


def test_slices_are_split_each_by_itself() -> None:
    held = PositionSplit(2, 1, "zigzag").local([8, 4], 1)
    assert list(held.own) == [2, 3, 4, 5, 9, 10]
    assert [list(block) for block in held.blocks] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_rows_of_positions() -> None:
    positions = Positions((StridedRange(10, 3), StridedRange(0, 3, 4)))
    assert positions.count == 6
    assert list(positions) == [10, 11, 12, 0, 4, 8]
    assert list(positions.rows(2, 5)) == [12, 0, 4]
    assert list(positions.part(1, 3)) == [12, 0]
    assert list(range(100)[positions.runs[1].here]) == [0, 4, 8]
    assert Positions.of(
        [StridedRange(2, 2), StridedRange(4, 1), StridedRange(6, 0), StridedRange(7, 2)]
    ).runs == (StridedRange(2, 3), StridedRange(7, 2))


def scores_of(queries: Positions, keys: Positions) -> list[tuple[int, int]]:
    """Return the pairs of positions that the entries hold."""
    at, of = list(queries), list(keys)
    found = []
    for entry in score_rects(queries, keys):
        rows, columns = at[entry.queries], of[entry.keys]
        if entry.causal:
            assert len(rows) == len(columns)
        here = [
            (q, k)
            for (i, q), (j, k) in itertools.product(enumerate(rows), enumerate(columns))
            if not entry.causal or j <= i
        ]
        assert entry.scores == len(here)
        found += here
    return found


@pytest.mark.parametrize(
    ("order", "lengths"),
    [
        *itertools.product(("zigzag", "contiguous"), ((1,), (2, 1), (1, 1, 3))),
        ("striped", (1,)),
    ],
)
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 5])
def test_entries_are_what_is_causal(ring: int, order: Order, lengths: tuple[int, ...]) -> None:
    """All blocks together have each score of a query with itself and what comes before it, once."""
    split = PositionSplit(ring, 1, order)
    lengths = tuple(2 * split.multiple * n for n in lengths)
    held, length, start = split.local(lengths, 0), sum(lengths), 0
    found: list[tuple[int, int]] = []
    for each in lengths:
        stop = start + each // ring
        for queries, keys in itertools.product(held.blocks, repeat=2):
            found += scores_of(queries.rows(start, stop), keys.rows(0, stop))
        start = stop
    assert sorted(found) == [(q, k) for q in range(length) for k in range(q + 1)]


def work(order: Order, ring: int, length: int) -> list[list[int]]:
    """Count the scores of each round and rank of a ring."""
    blocks = PositionSplit(ring, 1, order).local([length], 0).blocks
    return [
        [
            sum(entry.scores for entry in score_rects(blocks[p], blocks[(p - t) % ring]))
            for p in range(ring)
        ]
        for t in range(ring)
    ]


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_how_even_the_work_is(ring: int) -> None:
    """With contiguous blocks the slowest rank takes (2n - 1) / n of the mean. With zigzag all ranks
    take the same time, and with stripes they differ by one diagonal."""
    length = 64 * ring

    def slowest(order: Order) -> float:
        rounds = work(order, ring, length)
        mean = length * (length + 1) / 2 / ring
        return sum(map(max, rounds)) / mean

    assert all(len(set(each)) == 1 for each in work("zigzag", ring, length))
    assert slowest("zigzag") == 1
    size = length // ring
    for each in work("striped", ring, length)[1:]:
        assert max(each) - min(each) == size
    whole: Any = (2 * ring - 1) / ring
    assert slowest("contiguous") == pytest.approx(whole, rel=0.02)
    assert slowest("striped") < 1.02
