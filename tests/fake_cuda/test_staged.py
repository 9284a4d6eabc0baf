"""On gloo groups, tensors of a device go through host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megapipe.distributed import collectives
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import Grid
from tests.fake_cuda.world import run_world


def exchange(world: Any) -> dict[str, tuple[str, list[float]]]:
    """Run each collective; return, by its name, the device of the result and its values."""
    world.mesh(Grid(dp=2))
    group = dist.new_group([0, 1], backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    axis = Axis(2, world.rank, (0, 1), group)
    own = torch.arange(4.0, device="cuda") + 10 * world.rank
    summed = own.clone()
    collectives.start_all_reduce(summed, axis)()
    piece, wait = collectives.start_reduce_scatter(own, axis)
    wait()
    whole, wait = collectives.start_all_gather_new(own, axis)
    wait()
    swapped, wait = collectives.start_all_to_all(own, axis)
    wait()
    sends, receives = ((1, 3), (1, 2)) if world.rank == 0 else ((2, 2), (3, 2))
    uneven = collectives.all_to_all(own, sends, receives, axis)
    found = {"sum": summed, "piece": piece, "whole": whole, "swapped": swapped, "uneven": uneven}
    return {name: (tensor.device.type, tensor.tolist()) for name, tensor in found.items()}


def test_collectives_over_gloo() -> None:
    ranks = run_world(2, exchange)
    sums = [10.0, 12.0, 14.0, 16.0]
    values = [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]]
    expected = [
        {
            "sum": sums,
            "piece": sums[2 * rank : 2 * rank + 2],
            "whole": values[0] + values[1],
            "swapped": [each for own in values for each in own[2 * rank : 2 * rank + 2]],
            "uneven": [[0.0, 10.0, 11.0], [1.0, 2.0, 3.0, 12.0, 13.0]][rank],
        }
        for rank in range(2)
    ]
    for found, right in zip(ranks, expected, strict=True):
        assert found == {name: ("cuda", numbers) for name, numbers in right.items()}
