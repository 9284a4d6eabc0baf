"""Memory use of this process."""

import os
from pathlib import Path

import torch


def memory_gib(device: torch.device) -> float | None:
    """Return the memory in GiB: the allocator's peak on CUDA, else the current resident set.

    Returns None for a CPU if the operating system has no ``/proc``.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        resident_pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except OSError:
        return None
    return resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**30
