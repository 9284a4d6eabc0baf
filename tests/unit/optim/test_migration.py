"""Moves of experts between ranks and slices of a bucket: who sends what to whom."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest

from megapipe.distributed.axis import Axis
from megapipe.experts.map import ExpertMap
from megapipe.optim.moe.migration import MovedRange, MoveExchange, expert_moves, move_exchanges

Rank = tuple[int, int]
"""Member of the axis of slices, member of ep."""


def axis(size: int, index: int) -> Axis:
    return Axis(size, index, tuple(range(size)), None)


def shuffled(draw: random.Random, experts: int, ranks: int) -> ExpertMap:
    owners = [rank for rank in range(ranks) for _ in range(experts // ranks)]
    draw.shuffle(owners)
    return ExpertMap(tuple(owners), ((),) * ranks)


@pytest.mark.parametrize("seed", range(30))
def test_each_value_gets_to_its_new_place(seed: int) -> None:
    """So it is on all ranks, whose slices cut experts anywhere."""
    draw = random.Random(seed)
    ranks, etp, slices = draw.choice([2, 3, 4]), draw.choice([1, 2]), draw.choice([1, 2, 3])
    each, length, start = draw.randint(1, 4), draw.randint(1, 7), draw.randint(0, 5)
    before, after = (shuffled(draw, each * ranks, ranks) for _ in range(2))
    of_slice = -(-(start + each * length) // slices) + draw.randint(0, 3)
    block = list(product(range(slices), range(ranks * etp)))

    def bucket(of: ExpertMap, member: int) -> list[object]:
        """Return what a rank has in the end, in all slices: part, expert, number of the value."""
        values: list[object] = [("other", position) for position in range(of_slice * slices)]
        for slot, expert in enumerate(of.owned(member // etp)):
            for i in range(length):
                values[start + slot * length + i] = member % etp, expert, i
        return values

    found = expert_moves(before, after, start, length)
    here = {
        (i, m): move_exchanges(found, length, of_slice, axis(slices, i), axis(ranks * etp, m), etp)
        for i, m in block
    }
    first = {rank: hop for rank, (hop, _) in here.items()}
    second = {rank: hop for rank, (_, hop) in here.items()}
    held = {
        rank: {
            piece: bucket(before, rank[1])[piece.move.source + piece.start :][: size_of(piece)]
            for pieces in hop.sends
            for piece in pieces
        }
        for rank, hop in first.items()
    }
    for (i, m), piece in pieces_of(first):
        in_slice = range(of_slice * i, of_slice * (i + 1))
        source = piece.move.source
        assert {source + piece.start, source + piece.stop - 1} <= {*in_slice}, m
    arrived = exchanged(first, held, lambda rank, member: (rank[0], member))
    cut = {
        rank: {
            piece: values[piece.start - whole.start : piece.stop - whole.start]
            for pieces in second[rank].sends
            for piece in pieces
            for whole, values in come.items()
            if whole.move == piece.move
        }
        for rank, come in arrived.items()
    }
    final = exchanged(second, cut, lambda rank, member: (member, rank[1]))
    for (i, m), come in final.items():
        own = slice(of_slice * i, of_slice * (i + 1))
        values = bucket(before, m)
        for piece, new in come.items():
            goal = piece.move.goal
            values[goal + piece.start : goal + piece.stop] = new
        assert values[own] == bucket(after, m)[own]


def size_of(piece: MovedRange) -> int:
    return piece.stop - piece.start


def pieces_of(of_ranks: dict[Rank, MoveExchange]) -> list[tuple[Rank, MovedRange]]:
    return [(rank, piece) for rank, hop in of_ranks.items() for own in hop.sends for piece in own]


def exchanged(
    of_ranks: dict[Rank, MoveExchange],
    held: dict[Rank, dict[MovedRange, list[object]]],
    at: Callable[[Rank, int], Rank],
) -> dict[Rank, dict[MovedRange, list[object]]]:
    """Return what each rank receives; both of a pair know what they exchange, in which order."""
    come: dict[Rank, dict[MovedRange, list[object]]] = {rank: {} for rank in of_ranks}
    for rank, hop in of_ranks.items():
        for member, pieces in enumerate(hop.sends):
            other = at(rank, member)
            assert of_ranks[other].receives[hop.axis.index] == pieces
            come[other] |= {piece: held[rank][piece] for piece in pieces}
    return come


def test_experts_that_stay_where_they_are_do_not_travel() -> None:
    before = ExpertMap.even(6, 3)
    after = ExpertMap((0, 0, 2, 1, 1, 2), ((),) * 3)
    assert {(move.giver, move.taker) for move in expert_moves(before, after, 0, 5)} == {
        (1, 2),
        (1, 1),
        (2, 1),
    }
    assert not expert_moves(before, before, 0, 5)
