"""Who holds what at each ZeRO stage."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest

from megapipe.config.config import Config
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layout.buckets import BucketGroup, BucketPlan, process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.optim.groups import BucketGroups
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.placement import Placement

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


class Zero(NamedTuple):
    """A ZeRO stage, and how many replicas share one copy of its state."""

    stage: int = 1
    shard_size: int | None = None


class Axes(NamedTuple):
    """The axes of a bucket."""

    shard: Axis
    replicate: Axis


@functools.cache
def resolved(zero: Zero, dp: int = GRID.dp) -> tuple[Config, Layout]:
    """Resolve three stages with a layer of experts each."""
    tree = {
        "model": {
            "layers": 3,
            "hidden": 8,
            "heads": 2,
            "moe": {"num_experts": 2, "expert_ffn_hidden": 8},
        },
        "parallel": {"pp": GRID.pp, "dp": dp, "tp": GRID.tp, "sequence_parallel": True},
        "optimizer": {"zero": zero.stage, "shard_group_size": zero.shard_size},
        "train": {"sequence_length": 8, "global_batch": 2 * dp, "microbatch": 1},
    }
    return resolve(Config.model_validate(tree), None, 16)


@functools.cache
def planned(zero: Zero, holders: tuple[int, ...], pp: int, *, over_ep: bool = False) -> BucketPlan:
    """Plan the bucket of a stage that the pipeline indices `holders` hold, `pp` among them."""
    config, layout = resolved(zero)
    other = next(index for index in range(GRID.pp) if index not in holders)
    rest = [index for index in range(GRID.pp) if index not in (*holders, other)]
    rows = tuple((own, other, (*rest, other)[0]) for own in holders)
    layout = replace(layout, schedule=gpipe_on(Placement(GRID.pp, rows), 2))
    (found,) = (
        bucket
        for bucket in process_buckets(config, layout, pp)
        if (bucket.stage, bucket.over_ep) == (0, over_ep)
    )
    return found


def axes(zero: Zero, holders: tuple[int, ...], *, over_ep: bool = False) -> dict[int, Axes]:
    """Make the axes of a bucket, on each of its ranks."""
    found = {}
    for rank in range(GRID.world):
        pp = GRID.coordinates_of(rank).pp
        if pp in holders:
            mesh: Any = FakeMesh(rank)
            groups, plan = BucketGroups(mesh), planned(zero, holders, pp, over_ep=over_ep)
            found[rank] = Axes(groups.axis(plan.shard), groups.axis(plan.replicate))
    return found


HOLDERS = [(1,), (0, 2)]
ZEROS = [Zero(*each) for each in product(range(4), (None, 1, 2, 4)) if each[0] or not each[1]]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("holders", HOLDERS)
@pytest.mark.parametrize("zero", ZEROS, ids=str)
def test_slices_and_their_copies_cover_all_holders_once(
    zero: Zero, holders: tuple[int, ...], experts: bool
) -> None:
    """Gradients go over shard, then replicate: that adds every holder's up exactly once."""
    found = axes(zero, holders, over_ep=experts)
    for rank, (shard, replicate) in found.items():
        everyone = GRID.replica_ranks(rank, holders, over_ep=experts)
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


@pytest.mark.parametrize("zero", ZEROS, ids=str)
def test_sizes(zero: Zero) -> None:
    """A bucket has one holder, or two."""
    size = zero.shard_size or 4
    for holders in HOLDERS:
        found = axes(zero, holders)
        everyone = 4 * len(holders)
        if zero.stage == 0:
            expected = 1
        elif zero.shard_size is None and zero.stage < 3:
            expected = everyone  # one owner updates a slice, whoever holds it
        else:
            expected = size  # weights are gathered from neighbours of the same pipeline rank
        for shard, replicate in found.values():
            assert (shard.size, replicate.size) == (expected, everyone // expected)


def test_hybrid_shards_are_over_neighbours() -> None:
    """Replicas 0, 1 share a copy, and 2, 3; tp innermost, so replicas are two ranks apart."""
    found = axes(Zero(2, shard_size=2), (1,))
    assert found[8].shard.ranks == (8, 10)
    assert found[8].replicate.ranks == (8, 12)
    assert found[15].shard.ranks == (13, 15)
    assert found[15].replicate.ranks == (11, 15)


def of(copies: int, *holders: int, stride: int = 1) -> BucketGroup:
    """Describe a group of copies of a stage."""
    return BucketGroup("", copies, stride, holders, over_ep=False)


def test_neighbours_that_share_positions_come_first() -> None:
    """With dp x cp x tp = 2 x 2 x 2 they hold other positions of the same samples."""
    mesh: Any = FakeMesh(5, Grid(dp=2, cp=2, tp=2))
    groups = BucketGroups(mesh)
    assert groups.axis(of(2, 0)).ranks == (5, 7)
    assert groups.axis(of(2, 0, stride=2)).ranks == (1, 5)


def test_a_group_is_made_once_and_not_for_what_exists() -> None:
    mesh: Any = FakeMesh(0)
    groups = BucketGroups(mesh)
    assert groups.axis(of(4, 0)) is mesh.dp
    assert groups.axis(of(4, 0, 2)) is groups.axis(of(4, 0, 2))
    assert mesh.made == [(0, 2, 4, 6, 16, 18, 20, 22)]


def test_buckets_of_other_holders_share_a_group_of_the_same_ranks() -> None:
    mesh: Any = FakeMesh(0)
    groups = BucketGroups(mesh)
    zero = Zero(2, shard_size=2)
    one, two = (planned(zero, holders, 0) for holders in ((0,), (0, 2)))
    shard = groups.axis(one.shard)
    groups.axis(one.replicate)
    assert groups.axis(two.shard) is shard
    groups.axis(two.replicate)
    assert mesh.made == [(0, 2), (0, 4), (0, 4, 16, 20)]


def test_on_gpus_the_group_of_the_mesh_is_for_numbers_alone() -> None:
    mesh: Any = FakeMesh(0)
    mesh.backend = "nccl"
    assert BucketGroups(mesh).axis(of(4, 0)) is not mesh.dp
    assert mesh.made == [mesh.dp.ranks]


def test_nothing_is_made_where_a_process_is_alone() -> None:
    mesh: Any = FakeMesh(0, Grid(pp=3))
    mesh.made.clear()
    assert BucketGroups(mesh).axis(of(1, 0)).group is None
    assert mesh.made == []


@pytest.mark.parametrize(
    ("zero", "dp", "stage"),
    [
        (Zero(3), 4, 3),
        (Zero(3), 1, 3),  # experts have a copy on each tp rank
        (Zero(2, shard_size=1), 4, 1),
        (Zero(2, shard_size=2), 4, 2),
        (Zero(0), 1, 0),
        (Zero(), 4, 1),
    ],
)
def test_one_process_alone_has_nothing_to_share_out(zero: Zero, dp: int, stage: int) -> None:
    config, layout = resolved(zero, dp)
    buckets = list(process_buckets(config, layout, 0))
    assert {bucket.zero for bucket in buckets} == {stage}
    for bucket in buckets:
        several = bucket.shard.members > 1
        assert bucket.sharded_weights == (stage == 3 and several)
        if not bucket.shared:
            assert bucket.sharded_grads == (stage >= 2 and several)
            assert bucket.late == (stage >= 2 and not several)
