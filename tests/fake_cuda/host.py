"""The process that has the device, and runs worlds of forks of itself: see
:mod:`tests.fake_cuda.world`.

    python -m tests.fake_cuda.host LIBRARY SOCKET
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fake_cuda import device


def main(library: str, socket: str) -> None:
    """Run worlds as they are asked for, until nobody is there to ask."""
    own = device.install(Path(library))
    importlib.import_module("megapipe.train.trainer")  # once for all ranks

    requests = Connection(int(socket))
    while True:
        try:
            request = requests.recv()
        except EOFError:
            return
        except Exception as error:
            requests.send((False, f"the request cannot be read: {error!r}"))
            continue
        requests.send(_run(request, own))


def _run(request: Any, own: device.Device) -> tuple[bool, Any]:
    """(True, what each rank has returned) or (False, why not)."""
    from megapipe.launch.local import RankError, run_ranks

    context = multiprocessing.get_context("fork")
    try:
        return True, run_ranks(
            context,
            request.ranks,
            _on_rank,
            (request, own),
            group_timeout_s=request.group_timeout_s,
            timeout_s=request.timeout_s,
        )
    except RankError as error:
        return False, str(error)


def _on_rank(world: Any, request: Any, own: device.Device) -> Any:
    """Run the function on a rank, with a device of its own."""
    import gc

    import torch

    from tests.fake_cuda import nccl
    from tests.fake_cuda.ledger import Ledger
    from tests.fake_cuda.world import Report

    torch.cuda.set_device(world.rank)
    ledger = Ledger(world.rank)
    nccl.install(own, ledger)
    own_world = _device_world(world, own)
    result = request.function(own_world, *request.args)
    gc.collect()
    waits = own_world.take_waits()
    return result, Report(ledger, own_world.faults, waits)


def _device_world(world: Any, own: device.Device) -> Any:
    """The rank's view of its world, in which groups are nccl's."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore

    from megapipe.distributed.mesh import Grid, ParallelMesh
    from megapipe.launch.local import World

    class DeviceWorld(World):
        """A world on devices of its own."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.faults: list[str] = []
            """Those that were found when waits were last asked for."""

        def take_waits(self) -> dict[str, int]:
            """How often the host has waited for the device since this was last asked, and why."""
            noted = own.report()
            self.faults += noted["faults"]
            waits: dict[str, int] = noted["host_waits"]
            return waits

        def restart(self) -> None:
            if dist.is_initialized():
                if dist.get_backend() == "nccl":
                    dist.all_reduce(torch.zeros(1, device="cuda"))
                dist.destroy_process_group()
            self._lives += 1
            dist.init_process_group(
                "nccl",
                store=PrefixStore(f"device life {self._lives}", self._store),
                rank=self.rank,
                world_size=self.size,
                timeout=datetime.timedelta(seconds=self._timeout_s),
            )

        def mesh(self, grid: Grid, device: str = "cuda") -> ParallelMesh:
            self.restart()
            here = torch.device("cuda", torch.cuda.current_device())
            return ParallelMesh(grid, device=here, timeout_s=self._timeout_s)

    return DeviceWorld(world.rank, world.size, world._store, world._timeout_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
