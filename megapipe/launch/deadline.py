"""Deadlines at which a process ends, whatever its other threads wait for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

SLICE_S = 0.25
"""Length, in seconds, of the short waits with which :func:`is_set_within` counts time."""


def is_set_within(event: threading.Event, seconds: float) -> bool:
    """Wait for `event`, and return whether it was set within `seconds`.

    Only the time in which this process runs counts, because the time is counted in short waits. So
    a process that was suspended is not late when it continues.
    """
    left = seconds
    while left > 0:
        if event.wait(min(SLICE_S, left)):
            return True
        left -= SLICE_S
    return event.wait(SLICE_S)  # the thread that sets `event` may have waited for this process


@contextlib.contextmanager
def call_unless_done(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Call `end` in a new thread unless the body is done within `seconds`. Only the time in which
    this process runs counts.

    The body may be inside a C++ call that never returns.
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
        thread.join()  # else the thread may free tensors of `end` while Python exits
