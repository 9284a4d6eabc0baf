"""What fits into memory: errors of used-up memory, caught and cleared up after, and the search."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

_SIGNS = ("out of memory", "ALLOC_FAILED")
"""Words of the device's libraries for it, in errors of other types."""


def fits(run: Callable[[], object]) -> bool:
    """Call `run`; False if the device's memory did not suffice. Memory left over is freed."""
    try:
        run()
    except torch.OutOfMemoryError:
        enough = False
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        enough = False
    else:
        return True
    release()  # outside of the handler, whose traceback refers to what failed
    return enough


def release() -> None:
    """Free memory to which nothing refers any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(
    fits: Callable[[int], bool],
    *,
    start: int,
    most: int,
    hurry: Callable[[], bool] = lambda: False,
) -> int:
    """Return the largest n up to `most` that fits, to within an eighth; 0 if not even 1 does.

    Doubles from `start`, then bisects. Once there is `hurry`, the largest so far is taken.
    """
    good, bad = 0, most + 1
    trial = min(start, most)
    while bad - good > max(1, good // 8) and not (good and hurry()):
        if fits(trial):
            good = trial
        else:
            bad = trial
        trial = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


class Peak:
    """Most memory that torch has allocated on the device, in bytes, since this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int | None:
        """Return the bytes; None on a CPU, where they are not counted."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)
