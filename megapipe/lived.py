"""Time in which this process runs: deadlines do not pass while it is suspended.

No clock of the system stands still with a process that SIGSTOP suspends, as ``scontrol suspend``
does. So a wait is cut into short slices, of which each counts for a second at most.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Protocol

SLICE_S = 0.5
"""The longest wait between two looks at the clock."""
MOST_S = 1.0
"""The most that counts between two looks."""


class LivedTime:
    """A clock that begins at 0 and counts the seconds in which this process runs.

    Who waits looks at it every :data:`SLICE_S`, or less than `most_s` apart.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._last = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float:
        """Count the time since the last look, and return that since the beginning, seconds."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._most_s)
        self._last = now
        return self._seconds


class Waits(Protocol):
    """The part of a store (``torch.distributed.Store``) that is used."""

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        """Return when all keys are there. Raises DistStoreError after `timeout`."""


def await_keys(store: Waits, keys: Sequence[str], seconds: float) -> None:
    """Wait until a store has all keys. Raises torch's DistStoreError after `seconds` in which this
    process runs."""
    from torch.distributed import DistStoreError

    clock = LivedTime()
    while (left := seconds - clock.look()) > 0:
        try:
            store.wait(list(keys), datetime.timedelta(seconds=min(left, SLICE_S)))
        except DistStoreError:
            continue
        return
    raise DistStoreError(f"no {', '.join(keys)} in the store after {seconds:g} s")
