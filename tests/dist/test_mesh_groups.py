"""Process groups of a mesh of eight: who is in them, and what the small exchanges give."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from megapipe.distributed.collectives import all_gather, all_reduce
from megapipe.distributed.mesh import AXES, Axis, Grid, ParallelMesh
from megapipe.errors import LaunchError
from megapipe.testing import GROUP_TIMEOUT_S, World, run_world

GRIDS = (Grid(pp=2, dp=2, tp=2), Grid(pp=2, cp=2, tp=2), Grid(dp=4, tp=2), Grid(pp=8))
PARTS = (1.0, 1e8, -1e8, 1.0)
"""Terms whose sums in fp32 depend on the order."""


@dataclass
class Seen:
    """What one rank saw."""

    sums: list[dict[str, float]] = field(default_factory=list)
    gathered: list[dict[str, list[float]]] = field(default_factory=list)
    made: list[list[list[int]]] = field(default_factory=list)
    ordered: float = 0.0
    summed_with_largest: list[float] = field(default_factory=list)
    ordered_tp_then_dp: torch.Tensor | None = None
    wrong_world: str = ""
    shared: list[str] = field(default_factory=list)
    agreed: list[str | None] = field(default_factory=list)
    any: list[bool] = field(default_factory=list)
    pair: tuple[float, tuple[int, ...]] | None = None
    barrier: tuple[float, float] = (0.0, 0.0)


def visit(world: World) -> Seen:
    seen = Seen()
    for grid in GRIDS:
        visit_axes(world, grid, seen)
    mesh = world.mesh(Grid(dp=4, tp=2))
    visit_sums(mesh, seen)
    visit_exchanges(mesh, seen)
    try:
        ParallelMesh(Grid(dp=3), device=torch.device("cpu"), timeout_s=GROUP_TIMEOUT_S)
    except LaunchError as error:
        seen.wrong_world = str(error)
    return seen


def visit_axes(world: World, grid: Grid, seen: Seen) -> None:
    """Sum ranks along each axis, over the mesh's groups."""
    mesh = world.mesh(grid)
    _, *made = dist.distributed_c10d._world.pg_group_ranks.values()
    seen.made.append([list(ranks) for ranks in made])
    own = torch.tensor([float(mesh.rank)])
    axes: dict[str, Axis] = {name: getattr(mesh, name) for name in AXES}
    seen.sums.append({name: all_reduce(own.clone(), axis).item() for name, axis in axes.items()})
    seen.gathered.append({name: all_gather(own, axis).tolist() for name, axis in axes.items()})


def visit_sums(mesh: ParallelMesh, seen: Seen) -> None:
    seen.ordered = mesh.ordered_sum(torch.tensor([PARTS[mesh.dp.index]]), "dp").item()
    noise = torch.Generator().manual_seed(mesh.rank)
    vector = torch.randn(100, generator=noise)
    seen.ordered_tp_then_dp = mesh.ordered_sum(vector, "tp", "dp")
    vector = torch.tensor([1.0, mesh.rank, -mesh.rank])
    seen.summed_with_largest = mesh.ordered_sum(vector, *reversed(AXES), largest=2).tolist()
    ends = [0, 7]
    if mesh.rank in ends:
        pair = mesh.group_of(ends)
        seen.pair = all_reduce(torch.tensor([mesh.rank + 1.0]), pair).item(), pair.ranks


def visit_exchanges(mesh: ParallelMesh, seen: Seen) -> None:
    for text in ("first", "", "ä\n"):
        seen.shared.append(mesh.share(text if mesh.rank == 0 else "not heard"))
    for failing in ({}, {5: "rank 5 fails"}, {2: "both", 3: "both"}):
        seen.agreed.append(mesh.agree(failing.get(mesh.rank)))
    seen.any = [mesh.any(False), mesh.any(mesh.rank == 6), mesh.any(True)]
    time.sleep(0.3 if mesh.rank == 3 else 0.0)
    entered = time.monotonic()
    mesh.barrier()
    seen.barrier = entered, time.monotonic()


@pytest.fixture(scope="module")
def ranks() -> list[Seen]:
    return run_world(8, visit)


def test_each_axis_joins_the_right_ranks(ranks: list[Seen]) -> None:
    for i, grid in enumerate(GRIDS):
        for rank, seen in enumerate(ranks):
            peers = {axis: grid.peers(rank, axis) for axis in AXES}
            assert seen.sums[i] == {axis: sum(members) for axis, members in peers.items()}
            assert seen.gathered[i] == peers, "in the order of the axis"


def test_a_process_makes_its_own_groups_alone(ranks: list[Seen]) -> None:
    """One group per axis of several ranks, whatever the world: a process never enters a group of
    others."""
    for i, grid in enumerate(GRIDS):
        for rank, seen in enumerate(ranks):
            peers = [grid.peers(rank, axis) for axis in AXES]
            assert seen.made[i] == [members for members in peers if len(members) > 1]


def test_ordered_sum_adds_neighbours_then_pairs_of_them(ranks: list[Seen]) -> None:
    a, b, c, d = (torch.tensor(part) for part in PARTS)
    expected = ((a + b) + (c + d)).item()
    assert (((a + b) + c) + d).item() != expected, "the order matters here"
    assert {seen.ordered for seen in ranks} == {expected}

    a, b, c, d, e, f, g, h = (
        torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(8)
    )
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for seen in ranks:
        assert seen.ordered_tp_then_dp is not None
        assert torch.equal(seen.ordered_tp_then_dp, total), "bitwise, on every rank"


def test_of_the_last_values_the_largest_is_taken(ranks: list[Seen]) -> None:
    assert {tuple(seen.summed_with_largest) for seen in ranks} == {(8.0, 7.0, 0.0)}


def test_wrong_world_size_is_a_launch_error(ranks: list[Seen]) -> None:
    for seen in ranks:
        assert seen.wrong_world == (
            "world size 8 does not match the mesh pp 1 x dp 3 x cp 1 x tp 1 = 3"
        )


def test_exchanges_of_text_and_flags(ranks: list[Seen]) -> None:
    for seen in ranks:
        assert seen.shared == ["first", "", "ä\n"]
        assert seen.agreed == [None, "rank 5 fails", "both"]
        assert seen.any == [False, True, True]


def test_barrier_waits_for_the_last(ranks: list[Seen]) -> None:
    entered, left = zip(*(seen.barrier for seen in ranks), strict=True)
    assert max(entered) - min(entered) > 0.2, "one comes late"
    assert min(left) >= max(entered)


def test_a_group_of_any_ranks(ranks: list[Seen]) -> None:
    assert [seen.pair for seen in ranks] == [(9.0, (0, 7)), *[None] * 6, (9.0, (0, 7))]
