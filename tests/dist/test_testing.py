"""The test worlds themselves: a failing, dying or hanging rank is a failing test."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from megapipe.distributed.mesh import Grid
from megapipe.testing import World, WorldError, run_world


def rank_and_sum(world: World, factor: int) -> tuple[int, int, float]:
    total = torch.tensor([float(factor * world.rank)])
    dist.all_reduce(total)
    return world.rank, world.size, total.item()


def test_results_come_back_in_rank_order() -> None:
    assert run_world(3, rank_and_sum, 10) == [(0, 3, 30.0), (1, 3, 30.0), (2, 3, 30.0)]


def fail_on_rank_one(world: World) -> None:
    if world.rank == 1:
        raise ValueError("only here")
    dist.barrier()


def test_a_failing_rank_s_traceback_is_the_message() -> None:
    with pytest.raises(WorldError) as caught:
        run_world(2, fail_on_rank_one)
    text = str(caught.value)
    assert "--- rank 1:" in text
    assert "in fail_on_rank_one" in text
    assert "ValueError: only here" in text


def die_on_rank_zero(world: World) -> None:
    if world.rank == 0:
        os._exit(3)


def test_a_rank_that_dies_is_noticed() -> None:
    with pytest.raises(WorldError, match="rank 0:\ndied without an error message"):
        run_world(2, die_on_rank_zero)


def hang_on_rank_one(world: World) -> None:
    if world.rank == 1:
        time.sleep(60)


def test_a_rank_that_hangs_is_ended() -> None:
    start = time.monotonic()
    with pytest.raises(WorldError, match="rank 1:\ndid not end in time"):
        run_world(2, hang_on_rank_one, timeout_s=2.0)
    assert time.monotonic() - start < 30


def several_meshes(world: World) -> list[tuple[int, float]]:
    """Make meshes of equal and of different grids, one after the other."""
    seen = []
    for grid in (Grid(dp=2), Grid(pp=2), Grid(pp=2), Grid(tp=2)):
        mesh = world.mesh(grid)
        total = mesh.ordered_sum(torch.tensor([float(mesh.rank)]), "pp", "dp", "tp")
        seen.append((mesh.world, total.item()))
        assert mesh.device.type == "cpu"
        assert torch.get_num_threads() == 1
    return seen


def test_a_world_can_be_given_one_mesh_after_another() -> None:
    assert run_world(2, several_meshes) == [[(2, 1.0)] * 4] * 2
