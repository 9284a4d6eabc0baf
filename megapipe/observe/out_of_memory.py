"""The report on a device whose memory is used up: planned bytes beside those that were there."""

from __future__ import annotations

from pathlib import Path

import torch

from megapipe.config import Config
from megapipe.errors import OutOfMemory
from megapipe.layout.layout import Layout
from megapipe.plan.report import report

HISTORY = 100_000
"""Allocations that are remembered, with where they were made."""


def remember_allocations(device: torch.device) -> None:
    """Have snapshots tell where memory was asked for; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def out_of_memory(
    error: torch.OutOfMemoryError, config: Config, layout: Layout, rank: int
) -> OutOfMemory:
    """Write ``out_of_memory/plan.txt`` and, on a GPU, ``rank_N.pickle`` into the run folder.

    Returns the error to end with; never raises.
    """
    folder = Path(config.run.folder) / config.run.name / "out_of_memory"
    plan, snapshot = folder / "plan.txt", folder / f"rank_{rank:04d}.pickle"
    left = f"the plan is in {plan}, "
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan.write_text(report(config, layout))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(snapshot))
            left += f"a snapshot for pytorch.org/memory_viz in {snapshot}"
        else:
            left += "no snapshot beside it, which CUDA's allocator alone can make"
    except (OSError, RuntimeError) as problem:
        left = f"what was there cannot be written to {folder} ({problem})"
    reason = ". ".join(str(error).split(". ")[:2])  # that it is out of memory, what was asked for
    return OutOfMemory(
        f"rank {rank} is out of memory: {reason}: {left}; less is needed with a smaller "
        "train.microbatch, activations.policy=selective or full, or more ranks"
    )
