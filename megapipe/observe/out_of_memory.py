"""The report of an out-of-memory error: the failed allocation and the planned bytes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megapipe.config.config import Config
from megapipe.errors import MegapipeError, OutOfMemory
from megapipe.layout.layout import Layout
from megapipe.plan.figures import plan_figures
from megapipe.plan.memory_fit import size_text
from megapipe.plan.report import as_text
from megapipe.util.no_symlinks import make_folder, open_no_symlinks, write_no_symlinks

_HOST = re.compile(r"DefaultCPUAllocator: .*tried to allocate (\d+) bytes", re.DOTALL)
"""Pattern of torch's error message when host memory is exhausted."""
FOLDER = "out_of_memory"
HISTORY = 100_000
"""Number of recent allocations in a snapshot, each with its stack trace."""


def remember_allocations(device: torch.device) -> None:
    """Record allocations and their stack traces for memory snapshots; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=HISTORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that device or host memory is exhausted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and _HOST.search(str(error)) is not None
    )


def out_of_memory(error: BaseException, config: Config, layout: Layout, rank: int) -> OutOfMemory:
    """Write ``out_of_memory/plan.txt`` and, on a GPU, ``rank_N.pickle`` into the run folder.

    Returns the error that the rank should raise; failures to write become part of its text.
    """
    run = Path(config.run.folder) / config.run.name
    folder = run / FOLDER
    plan, snapshot = folder / "plan.txt", folder / f"rank_{rank:04d}.pickle"
    planned, text = _plan(config, layout)
    left = f"the whole plan is in {plan}, " if text else ""
    try:
        make_folder(run, FOLDER)  # the run folder may not exist yet
        if text:
            write_no_symlinks(run, f"{FOLDER}/{plan.name}", text)
        if torch.cuda.is_available():
            open_no_symlinks(run, f"{FOLDER}/{snapshot.name}", "wb").close()  # torch follows links
            torch.cuda.memory._dump_snapshot(str(snapshot))
            left += f"a snapshot for pytorch.org/memory_viz in {snapshot}"
        else:
            left += "no memory snapshot, which only CUDA's allocator can make"
    except (OSError, RuntimeError) as problem:
        left = f"the details cannot be written to {folder} ({problem})"
    return OutOfMemory(
        f"rank {rank} is out of memory: {_reason(error)}: {planned}, {left}; "
        "use a smaller train.microbatch, activations.policy=selective or full, or more ranks"
    )


def _reason(error: BaseException) -> str:
    """Describe the allocation that failed."""
    if host := _HOST.search(str(error)):
        return f"the host refused {size_text(int(host[1]))} at once"
    return ". ".join(str(error).split(". ")[:2]) or "the host refused more"


def _plan(config: Config, layout: Layout) -> tuple[str, str]:
    """Return the planned bytes of the process that needs most, and the whole plan; if the run
    cannot be planned, the reason and ""."""
    try:
        figures = plan_figures(config, layout)
    except (MegapipeError, RuntimeError, MemoryError) as problem:
        return f"it cannot be planned ({problem})", ""
    most = figures.memory.most
    return f"the plan counts {size_text(most.total)} per process ({most.text})", as_text(figures)
