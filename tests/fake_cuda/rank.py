"""A rank of a world, in a process that has the device."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

from megapipe.distributed.environment import set_environment
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.launch.local import World
from tests.fake_cuda import nccl
from tests.fake_cuda.ledger import Ledger
from tests.fake_cuda.preload import own
from tests.fake_cuda.world import Report


class DeviceWorld(World):
    """A rank's view of its world; groups use nccl, and each rank has its own device."""

    backend = "nccl"

    def mesh(self, grid: Grid, device: str = "cuda") -> ParallelMesh:
        self.restart()
        here = torch.device("cuda", torch.cuda.current_device())
        return ParallelMesh(grid, device=here, timeout_s=self._timeout_s)


def run(world: World, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Report]:
    """Run a function on this rank; return its result, and what the rank's device has noted."""
    set_environment(os.environ, sends_messages=True, deterministic=False)
    torch.cuda.set_device(world.rank)
    ledger = Ledger(world.rank)
    nccl.install(own, ledger)
    here = DeviceWorld(world.rank, world.size, world._store, world._timeout_s)
    result = function(here, *args)
    gc.collect()
    noted = own.report()
    return result, Report(ledger, noted["faults"], noted["host_waits"])
