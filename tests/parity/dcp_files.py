"""Folders of torch.distributed.checkpoint, written by one process or several."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megapipe.testing import World
from tests.parity.converted import state_of


def save_dcp(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write a state dict as torch.distributed.checkpoint does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process writes
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def save_shards(world: World, folder: Path) -> None:
    """Save, on each rank, its rows of each tensor, as with FSDP, and then its columns."""
    mesh = init_device_mesh("cpu", (world.size,))
    state = state_of(folder / "hf")
    for dim in (0, 1):
        shards = {
            name: distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.dim() - 1))])
            for name, tensor in state.items()
        }
        dcp.save({"model": shards, "step": 3}, checkpoint_id=folder / f"dcp{dim}")
