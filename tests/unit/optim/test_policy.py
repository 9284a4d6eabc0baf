"""Who holds what at each ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import Axis, Grid
from megapipe.optim.policy import BucketAxes, BucketGroups, ZeroPolicy

GRID = Grid(pp=3, dp=4, tp=2)


class FakeMesh:
    """A rank of a grid, whose groups never communicate."""

    backend = "gloo"

    def __init__(self, rank: int, grid: Grid = GRID) -> None:
        self.rank, self.grid = rank, grid
        self.dp = self.group_of(grid.peers(rank, "dp"))
        self.made: list[tuple[int, ...]] = []
        """Members of the groups that were asked for, in order."""

    def group_of(self, ranks: Sequence[int]) -> Axis:
        if hasattr(self, "made"):
            self.made.append(tuple(ranks))
        return Axis(len(ranks), list(ranks).index(self.rank), tuple(ranks), None)

    def connected(self, axis: Axis) -> Axis:
        return axis


def axes(
    policy: ZeroPolicy, holders: Sequence[int], *, experts: bool = False
) -> dict[int, BucketAxes]:
    """The axes of a bucket, on each of its ranks."""
    found = {}
    for rank in range(GRID.world):
        if GRID.coordinates_of(rank).pp in holders:
            mesh: Any = FakeMesh(rank)
            found[rank] = BucketGroups(mesh, policy).axes_of(holders, experts=experts)
    return found


HOLDERS = [(1,), (0, 2)]
POLICIES = [
    ZeroPolicy(stage, size)
    for stage, size in product(range(4), (None, 1, 2, 4))
    if stage or not size
]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("holders", HOLDERS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_slices_and_their_copies_cover_all_holders_once(
    policy: ZeroPolicy, holders: tuple[int, ...], experts: bool
) -> None:
    """Gradients go over shard, then replicate: that adds every holder's up exactly once."""
    found = axes(policy, holders, experts=experts)
    for rank, (shard, replicate) in found.items():
        everyone = GRID.holders(rank, holders, experts=experts)
        assert len(everyone) == len(holders) * (8 if experts else 4)
        for axis in (shard, replicate):
            assert axis.ranks[axis.index] == rank
            assert list(axis.ranks) == sorted(axis.ranks)
        reached = [other for first in shard.ranks for other in found[first].replicate.ranks]
        assert sorted(reached) == sorted(everyone)
        for other in shard.ranks:
            assert found[other].shard.ranks == shard.ranks, "all members see the same group"
            assert found[other].replicate.index == replicate.index, "and own parts of their own"
        for other in replicate.ranks:
            assert found[other].replicate.ranks == replicate.ranks
            assert found[other].shard.index == shard.index, "of the same slice"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_sizes(policy: ZeroPolicy) -> None:
    """Of a bucket of one holder, and of one of two."""
    size = policy.shard_size or 4
    for holders in HOLDERS:
        found = axes(policy, holders)
        everyone = 4 * len(holders)
        if policy.stage == 0:
            expected = 1
        elif policy.shard_size is None and policy.stage < 3:
            expected = everyone  # one owner updates a slice, whoever holds it
        else:
            expected = size  # weights are gathered from neighbours of the same pipeline rank
        for shard, replicate in found.values():
            assert (shard.size, replicate.size) == (expected, everyone // expected)


def test_hybrid_shards_are_over_neighbours() -> None:
    """Replicas 0, 1 share a copy, and 2, 3; tp innermost, so replicas are two ranks apart."""
    found = axes(ZeroPolicy(2, shard_size=2), [1])
    assert found[8].shard.ranks == (8, 10)
    assert found[8].replicate.ranks == (8, 12)
    assert found[15].shard.ranks == (13, 15)
    assert found[15].replicate.ranks == (11, 15)


def test_neighbours_that_share_positions_come_first() -> None:
    """Of dp x cp x tp = 2 x 2 x 2, the ranks that hold other positions of the same samples."""
    mesh: Any = FakeMesh(5, Grid(dp=2, cp=2, tp=2))
    found = BucketGroups(mesh, ZeroPolicy(2, shard_size=2)).axes_of([0])
    assert found.shard.ranks == (5, 7)
    assert found.replicate.ranks == (1, 5)


def test_a_group_is_made_once_and_not_for_what_exists() -> None:
    mesh: Any = FakeMesh(0)
    groups = BucketGroups(mesh, ZeroPolicy(1))
    assert groups.axes_of([0]).shard is mesh.dp
    first = groups.axes_of([0, 2])
    assert groups.axes_of([2, 0, 2]).shard is first.shard
    assert mesh.made == [(0, 2, 4, 6, 16, 18, 20, 22)]


def test_buckets_of_other_holders_share_a_group_of_the_same_ranks() -> None:
    mesh: Any = FakeMesh(0)
    groups = BucketGroups(mesh, ZeroPolicy(2, shard_size=2))
    assert groups.axes_of([0]).shard is groups.axes_of([0, 2]).shard
    assert mesh.made == [(0, 2), (0, 4), (0, 4, 16, 20)]


def test_on_gpus_the_group_of_the_mesh_is_for_numbers_alone() -> None:
    mesh: Any = FakeMesh(0)
    mesh.backend = "nccl"
    assert BucketGroups(mesh, ZeroPolicy(1)).axes_of([0]).shard is not mesh.dp
    assert mesh.made == [mesh.dp.ranks]


def test_nothing_is_made_where_a_process_is_alone() -> None:
    mesh: Any = FakeMesh(0, Grid(pp=3))
    mesh.made.clear()
    shard, replicate = BucketGroups(mesh, ZeroPolicy(1)).axes_of([0])
    assert shard.group is replicate.group is None
    assert mesh.made == []


@pytest.mark.parametrize(
    ("settings", "dp", "stage"),
    [
        ({"zero": 3}, 4, 3),
        ({"zero": 3}, 1, 1),
        ({"zero": 2, "shard_size": 1}, 4, 1),
        ({"zero": 2, "shard_size": 2}, 4, 2),
        ({"zero": 0}, 1, 0),
        ({}, 4, 1),
    ],
)
def test_one_process_alone_has_nothing_to_share_out(
    settings: dict[str, Any], dp: int, stage: int
) -> None:
    policy = ZeroPolicy.of(OptimizerConfig.model_validate(settings), dp)
    assert policy.stage == stage
    assert policy.shards_gradients == (stage >= 2)
    assert policy.shards_weights == (stage == 3)


def test_settings() -> None:
    given = {"zero": 3, "shard_size": 2, "prefetch": 4, "reduce_dtype": "bf16"}
    policy = ZeroPolicy.of(OptimizerConfig.model_validate(given), 4)
    assert policy == ZeroPolicy(3, 2, 4, torch.bfloat16, 256.0)
    assert ZeroPolicy.of(OptimizerConfig(), 4).reduce_dtype is None
