"""Time in which this process runs: deadlines do not pass while it is suspended.

No clock of the system stands still with a process that SIGSTOP suspends, as ``scontrol suspend``
does. So a wait is cut into short slices, of which each counts for a second at most.
"""

import time

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
