"""torch's flight record of the collectives on a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapipe.distributed.flight import flight_record
from megapipe.testing import World, run_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL"),
]


def reduced(world: World) -> list[dict[str, Any]]:
    """Return the entries of the record after NCCL has summed a tensor over this rank alone."""
    group = dist.new_group([0], backend="nccl")
    values = torch.ones(3, 5, device="cuda")  # [3, 5]
    dist.all_reduce(values, group=group)
    torch.cuda.synchronize()
    record = flight_record()
    assert record is not None
    entries: list[dict[str, Any]] = json.loads(record)["entries"]
    return entries


def test_the_record_has_what_nccl_was_told_to_do() -> None:
    """And that it is complete: after a hang these entries show which collective is not."""
    (entries,) = run_world(1, reduced)
    (entry,) = (entry for entry in entries if entry["profiling_name"] == "nccl:all_reduce")
    assert entry["input_sizes"] == [[3, 5]]
    assert entry["state"] == "completed"
