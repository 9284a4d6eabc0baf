"""On a GPU: state in host memory or on a disk, loaded while the GPU computes, gives the results of
state in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.optim.rounding import scratch_bytes
from megapipe.optim.state_store import MIB, StatePolicy, StateStore

pytestmark = pytest.mark.gpu
N = 3 * MIB
NAMES = ("exp_avg", "exp_avg_sq")


def updated(dtype: torch.dtype, policy: StatePolicy) -> list[Tensor]:
    """Return weights and state after three steps of Adam without bias correction."""
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(N, generator=generator, device="cuda").to(dtype)
    store = StateStore(weights, NAMES, policy)
    for step in range(3):
        grad = torch.randn(N, generator=generator, device="cuda")
        store.begin(step)
        for window in store.windows(0, N):
            first, second = window.states
            here = grad[window.start : window.stop]
            first.mul_(0.9).add_(here, alpha=0.1)
            second.mul_(0.95).add_(here * here * 0.05)
            for _ in range(20):  # long enough for the next window to arrive too early
                here = here.sin()
            window.master.sub_(0.01 * first / (second.sqrt() + 1e-6))
    return [weights, *(store.read(name, 0, N).cuda() for name in ("model", *NAMES))]


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"state_dtype": "bf16", "rounding": "nearest"}),
        (torch.bfloat16, {"state_dtype": "bf16", "rounding": "stochastic", "master": "none"}),
    ],
)
def test_offloaded_state_is_bitwise_that_in_place(
    dtype: torch.dtype, settings: dict[str, Any], place: Any, tmp_path: Path
) -> None:
    budget = 8 * MIB + scratch_bytes(torch.device("cuda"))  # random numbers take some of it
    there = StatePolicy(**settings, place=place, folder=tmp_path, window_bytes=budget)
    in_place = updated(dtype, StatePolicy(**settings))
    for mine, theirs in zip(updated(dtype, there), in_place, strict=True):
        assert mine.equal(theirs)


def test_memory_of_the_device_keeps_to_the_budget() -> None:
    budget = 8 * MIB
    weights = torch.zeros(N, dtype=torch.bfloat16, device="cuda")
    store = StateStore(weights, NAMES, StatePolicy(place="host", window_bytes=budget))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for window in store.windows(0, N):
        window.master.add_(1)
    # the allocator hands out whole blocks: to two windows of three arrays, and to the two numbers
    # that tell whether values are finite
    rounding = (2 * 3 + 2) * 512
    assert torch.cuda.max_memory_allocated() - before <= budget + rounding
    assert store.read("model", 0, N).is_pinned()
    assert store.read("model", 0, N).eq(1).all()
    assert weights.eq(1).all()
