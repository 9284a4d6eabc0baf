"""The time that a rank computes by itself: in its operations, less its waits for others in them.

Tensor-parallel ranks exchange parts of results in the middle of operations. There the peers of a
slow rank wait for it, so that their operations take as long as its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeTime:
    """Moments at which this rank begins to compute by itself, and ceases to, by turns."""

    def __init__(self) -> None:
        self.stamp: Callable[[], Any] = time.perf_counter
        """Marks the present moment."""
        self._moments: list[Any] = []
        self.on = False
        """Whether the time of operations is taken."""
        self.inside = False
        """Whether an operation runs whose time is taken."""

    def start(self) -> None:
        """Take the time of what comes now."""
        self._moments = []
        self.on = True

    def stop(self) -> list[Any]:
        """Take it no longer; returns the moments since the start."""
        self.on = self.inside = False
        return self._moments

    def operation(self, call: Callable[[], None]) -> None:
        """Call what computes an operation, and take its time; to be used where :attr:`on`."""
        self._moments.append(self.stamp())
        self.inside = True
        call()
        self.inside = False
        self._moments.append(self.stamp())

    def waiting(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what waits for others; returns what it does. To be used where :attr:`inside`."""
        self._moments.append(self.stamp())
        result = call(*args, **kwargs)
        self._moments.append(self.stamp())
        return result
