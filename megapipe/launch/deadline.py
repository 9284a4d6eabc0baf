"""A time by which a process has ended, whatever its other threads wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

SLICE_S = 0.5


@contextlib.contextmanager
def unless_within(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end`, in a thread of its own, unless the block is done within `seconds`.

    The block may be inside a call of C++ that never returns. Only the time in which this process
    runs counts, as it is counted in short waits: one that was suspended is not late when it goes
    on.
    """
    done = threading.Event()

    def count() -> None:
        left = seconds
        while left > 0:
            if done.wait(min(SLICE_S, left)):
                return
            left -= SLICE_S
        if not done.wait(SLICE_S):  # the block may have waited for this process to go on
            end()

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # else it may be what frees tensors that `end` leads to, while Python ends
