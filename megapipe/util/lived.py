"""A clock that stops while this process is suspended, so that time limits do not expire meanwhile.

System clocks go on while a process is suspended by SIGSTOP, which ``scontrol suspend`` sends. So a
long wait is made of short waits, and each of them counts for at most one second.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Protocol

SLICE_S = 0.5
"""Length of the short waits, seconds: after each one the clock is read."""
LEAST_S = 0.01
"""Shortest timeout passed to a torch store, seconds: torch reads less than 1 ms as no timeout."""
MOST_S = 1.0
"""Default for the maximum number of seconds that the clock counts between two readings."""


class LivedTime:
    """A clock that starts at 0 and counts the seconds in which this process is not suspended.

    Between two calls of :meth:`look` it counts at most `most_s` seconds; the rest is taken for a
    suspension. So a waiting caller must call :meth:`look` more often than that.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._last = time.monotonic()
        self._seconds = 0.0

    def look(self) -> float:
        """Return the seconds counted since the clock was made."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._most_s)
        self._last = now
        return self._seconds


class Waits(Protocol):
    """Methods of a rendezvous store (``torch.distributed.Store``) with which one waits for keys."""

    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None:
        """Return when the store has all keys. Raises RuntimeError after `timeout`."""

    def check(self, keys: list[str], /) -> bool:
        """Whether the store has all keys. Raises RuntimeError if the store is lost."""


def await_keys(store: Waits, keys: Sequence[str], seconds: float) -> None:
    """Wait until the store has all keys. Raises the store's error after `seconds`, not counting
    time in which this process is suspended, or at once if the store is lost."""
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
