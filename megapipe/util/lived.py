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
LEAST_S = 0.01
"""The shortest wait for a store: less than a millisecond counts as for ever."""
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
        """Return when all keys are there. Raises RuntimeError after `timeout`."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there. Raises RuntimeError if the store is lost."""


def await_keys(store: Waits, keys: Sequence[str], seconds: float) -> None:
    """Wait until a store has all keys. Raises what its wait raises, after `seconds` in which this
    process runs, and at once if the store is lost."""
    clock, wanted = LivedTime(), list(keys)
    while True:
        left = min(max(seconds - clock.look(), LEAST_S), SLICE_S)
        try:
            return store.wait(wanted, datetime.timedelta(seconds=left))
        except RuntimeError as error:
            if store.check(wanted):
                return None
            if clock.look() >= seconds:
                line = f"no {', '.join(wanted)} in the store after {seconds:g} s"
                raise type(error)(line) from None
