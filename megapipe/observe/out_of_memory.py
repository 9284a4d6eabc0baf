"""The report on memory that is used up, of a device or of the host: planned bytes beside those that
were there."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megapipe.config.config import Config
from megapipe.errors import MegapipeError, OutOfMemory
from megapipe.layout.layout import Layout
from megapipe.plan.demand import demand, size_text
from megapipe.plan.report import report
from megapipe.plan.units import units_of_run
from megapipe.util.beneath import make_folder, open_no_symlinks, write_no_symlinks

_HOST = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes", re.DOTALL)
"""The message where torch is refused memory of the host."""
FOLDER = "out_of_memory"
HISTORY = 100_000
"""Allocations that are remembered, with where they were made."""


def remember_allocations(device: torch.device) -> None:
    """Have snapshots tell where memory was asked for; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host has refused memory."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _HOST.search(str(error)) is not None
    )


def out_of_memory(error: BaseException, config: Config, layout: Layout, rank: int) -> OutOfMemory:
    """Write ``out_of_memory/plan.txt`` and, on a GPU, ``rank_N.pickle`` into the run folder.

    Returns the error to end with; never raises.
    """
    run = Path(config.run.folder) / config.run.name
    folder = run / FOLDER
    plan, snapshot = folder / "plan.txt", folder / f"rank_{rank:04d}.pickle"
    left = f"all of it is in {plan}, "
    try:
        make_folder(run, FOLDER)  # of a run, perhaps, that has none of its own yet
        write_no_symlinks(run, f"{FOLDER}/{plan.name}", report(config, layout))
        if torch.cuda.is_available():
            open_no_symlinks(run, f"{FOLDER}/{snapshot.name}", "wb").close()  # torch follows links
            torch.cuda.memory._dump_snapshot(str(snapshot))
            left += f"a snapshot for pytorch.org/memory_viz in {snapshot}"
        else:
            left += "no snapshot beside it, which CUDA's allocator alone can make"
    except (OSError, RuntimeError) as problem:
        left = f"what was there cannot be written to {folder} ({problem})"
    return OutOfMemory(
        f"rank {rank} is out of memory: {_reason(error)}: {_planned(config, layout)}{left}; less "
        "is needed with a smaller train.microbatch, activations.policy=selective or full, or more "
        "ranks"
    )


def _reason(error: BaseException) -> str:
    """The allocation that was refused, as text."""
    if host := _HOST.search(str(error)):
        return f"the host refused {size_text(int(host[1]))} at once"
    return ". ".join(str(error).split(". ")[:2]) or "the host refused more"


def _planned(config: Config, layout: Layout) -> str:
    """The plan's bytes, as text that goes on; nothing where there is no plan."""
    try:
        totals, parts = demand(units_of_run(config, layout))
    except (MegapipeError, RuntimeError, MemoryError):
        return ""
    return f"the plan counts {size_text(max(totals))} per process ({parts}), "
