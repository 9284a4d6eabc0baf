"""The arithmetic between ranks and coordinates; no process is started here."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.distributed.mesh import AXES, Axis, AxisName, Grid, MeshCoordinates, sum_in_pairs

LARGEST = 16384


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draw any grid of at most LARGEST processes."""
    sizes, left = {}, LARGEST
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, left) | st.integers(1, min(left, 8)))
        left //= sizes[axis]
    return Grid(**sizes)


@st.composite
def places(draw: st.DrawFn) -> tuple[Grid, int]:
    grid = draw(grids())
    return grid, draw(st.integers(0, grid.world - 1))


@given(places())
def test_rank_and_coordinates_are_inverse(place: tuple[Grid, int]) -> None:
    grid, rank = place
    at = grid.coordinates_of(rank)
    assert all(0 <= getattr(at, axis) < grid.size(axis) for axis in AXES)
    assert grid.rank_of(at) == rank


def test_every_rank_has_coordinates_of_its_own_in_row_order() -> None:
    grid = Grid(pp=16, dp=32, cp=4, tp=8)
    assert grid.world == LARGEST
    seen = [grid.coordinates_of(rank) for rank in range(grid.world)]
    assert seen == sorted(set(seen))
    assert len(seen) == LARGEST


def test_tensor_parallel_peers_are_neighbours_and_pipeline_peers_are_far() -> None:
    grid = Grid(pp=2, dp=3, cp=2, tp=4)
    assert grid.rank_of(MeshCoordinates(pp=1, dp=2, cp=1, tp=3)) == 47
    assert grid.peers(5, "tp") == [4, 5, 6, 7]
    assert grid.peers(5, "cp") == [1, 5]
    assert grid.peers(5, "dp") == [5, 13, 21]
    assert grid.peers(5, "pp") == [5, 29]


@given(places(), st.sampled_from(AXES))
def test_peers_differ_along_their_axis_alone(place: tuple[Grid, int], axis: AxisName) -> None:
    grid, rank = place
    at, peers = grid.coordinates_of(rank), grid.peers(rank, axis)
    assert len(peers) == grid.size(axis)
    assert peers == sorted(peers)
    assert peers[getattr(at, axis)] == rank
    for index in {0, len(peers) - 1}:
        assert grid.coordinates_of(peers[index]) == at._replace(**{axis: index})
        assert grid.peers(peers[index], axis) == peers, "the members agree on who they are"


@given(places(), st.data())
def test_holders_are_the_replicas_of_some_pipeline_ranks(
    place: tuple[Grid, int], data: st.DataObject
) -> None:
    grid, rank = place
    at = grid.coordinates_of(rank)
    indices = sorted(data.draw(st.sets(st.integers(0, grid.pp - 1), min_size=1, max_size=2)))
    holders = grid.replica_ranks(rank, indices)
    assert holders == sorted(set(holders)), "ascending, as process groups are"
    assert len(holders) == len(indices) * grid.dp * grid.cp
    for holder in (holders[0], holders[-1]):
        there = grid.coordinates_of(holder)
        assert there.tp == at.tp
        assert there.pp in indices
        assert grid.replica_ranks(holder, indices) == holders


def test_experts_have_copies_on_all_tensor_parallel_ranks_too() -> None:
    grid = Grid(pp=2, dp=2, cp=2, tp=2)
    assert grid.replica_ranks(3, [0], over_ep=True) == list(range(8))
    assert grid.replica_ranks(3, [1, 0], over_ep=True) == [*range(8, 16), *range(8)]
    copies = [grid.replica_index(rank, over_ep=True) for rank in range(8, 16)]
    assert copies == list(range(grid.num_replicas(over_ep=True)))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@given(places(), st.data())
def test_experts_are_shared_out_once_among_the_ranks_of_a_pipeline_index(
    place: tuple[Grid, int], data: st.DataObject
) -> None:
    grid, rank = place
    block = grid.dp * grid.cp * grid.tp
    ranks = data.draw(st.sampled_from(divisors(block)))
    ep = data.draw(st.sampled_from(divisors(ranks)))
    grid = replace(grid, ep=ep, etp=ranks // ep)
    peers, pp = grid.ep_peers(rank), grid.coordinates_of(rank).pp
    assert len(peers) == ranks
    copies = [grid.replica_ranks(peer, [pp], over_ep=True) for peer in peers]
    assert all(len(each) == grid.num_replicas(over_ep=True) for each in copies)
    assert sorted(chain(*copies)) == list(range(pp * block, (pp + 1) * block))
    for each in copies:
        assert [grid.replica_index(peer, over_ep=True) for peer in each] == list(range(len(each)))
        assert len({peer % ranks for peer in each}) == 1, (
            "all have the same part of the same experts"
        )


def test_holders_of_the_own_pipeline_rank_are_the_data_parallel_peers() -> None:
    grid = Grid(pp=3, dp=4, tp=2)
    for rank in range(grid.world):
        at = grid.coordinates_of(rank)
        assert grid.replica_ranks(rank, [at.pp]) == grid.peers(rank, "dp")


@pytest.mark.parametrize("axis", AXES)
def test_size_of_an_axis(axis: AxisName) -> None:
    grid = Grid(**{axis: 7})
    assert [grid.size(name) for name in AXES] == [7 if name == axis else 1 for name in AXES]


def test_an_axis_alone_has_no_group() -> None:
    assert Axis.alone(5) == Axis(size=1, index=0, ranks=(5,), group=None)


@given(st.integers(1, 70))
def test_sum_in_pairs_is_one_order_for_every_number_of_rows(count: int) -> None:
    parts = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    rows = list(parts)
    while len(rows) > 1:
        rows = [sum(rows[i + 1 : i + 2], rows[i]) for i in range(0, len(rows), 2)]
    assert torch.equal(sum_in_pairs(parts), rows[0])


def test_sum_in_pairs_depends_on_the_order() -> None:
    parts = torch.tensor([[1.0], [1e8], [-1e8], [1.0]])
    assert sum_in_pairs(parts).item() == 0.0
    assert sum_in_pairs(parts[[1, 2, 0, 3]]).item() == 2.0
