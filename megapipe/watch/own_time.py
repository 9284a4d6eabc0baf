"""The time that a rank computes by itself: in its operations, less its waits for others in them.

Tensor-parallel ranks exchange parts of results in the middle of operations. There the peers of a
slow rank wait for it, so that their operations take as long as its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class OwnTime:
    """Moments at which this rank begins to compute by itself, and ceases to, by turns."""

    def __init__(self) -> None:
        self.stamp: Callable[[], Any] = time.perf_counter
        """Marks the present moment."""
        self._moments: list[Any] = []
        self._on = False
        self._inside = False
        """Whether an operation runs whose time is taken."""

    def start(self) -> None:
        """Take the time of what comes now."""
        self._moments = []
        self._on = True

    def stop(self) -> list[Any]:
        """Take it no longer; returns the moments since the start."""
        self._on = self._inside = False
        return self._moments

    def of_operation(self, call: Callable[[], None]) -> Callable[[], None]:
        """`call`, which computes an operation."""

        def run() -> None:
            if not self._on:
                call()
                return
            self._moments.append(self.stamp())
            self._inside = True
            call()
            self._inside = False
            self._moments.append(self.stamp())

        return run

    def waiting(self, call: Callable[[], T]) -> T:
        """Call what waits for others; returns what it does."""
        if not self._inside:
            return call()
        self._moments.append(self.stamp())
        result = call()
        self._moments.append(self.stamp())
        return result
