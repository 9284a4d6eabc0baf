"""A time by which a process has ended, whatever its other threads wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

SLICE_S = 0.25
"""Longest of the waits in which the time is counted, and the time added to be sure."""


def is_set_within(event: threading.Event, seconds: float) -> bool:
    """Wait for `event`, and return whether it was set within `seconds`.

    Only the time in which this process runs counts, as it is counted in short waits: one that was
    suspended is not late when it goes on.
    """
    left = seconds
    while left > 0:
        if event.wait(min(SLICE_S, left)):
            return True
        left -= SLICE_S
    return event.wait(SLICE_S)  # whoever sets it may have waited for this process to go on


@contextlib.contextmanager
def call_unless_done(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end`, in a thread of its own, unless the block is done within `seconds` in which this
    process runs.

    The block may be inside a call of C++ that never returns.
    """
    done = threading.Event()

    def count() -> None:
        if not is_set_within(done, seconds):
            end()

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()  # else it may be what frees tensors that `end` leads to, while Python ends
