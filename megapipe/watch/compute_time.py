"""A rank's compute time: the time of its operations, without the waits for other ranks in them.

Tensor-parallel ranks exchange partial results in the middle of operations, where the peers of a
slow rank wait for it. If these waits were not subtracted, the peers' operations would take as long
as the slow rank's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeTime:
    """Records time stamps at which this rank alternately starts and stops computing."""

    def __init__(self) -> None:
        self.stamp: Callable[[], Any] = time.perf_counter
        """Function that returns a time stamp of the present moment."""
        self._moments: list[Any] = []
        self.on = False
        """Whether operations are being measured."""
        self.inside = False
        """Whether a measured operation is running."""

    def start(self) -> None:
        """Start measuring operations."""
        self._moments = []
        self.on = True

    def stop(self) -> list[Any]:
        """Stop measuring. Return the time stamps: start, stop, start, stop and so on."""
        self.on = self.inside = False
        return self._moments

    def operation(self, call: Callable[[], None]) -> None:
        """Run `call`, which computes an operation, and measure it. Use only while :attr:`on`."""
        self._moments.append(self.stamp())
        self.inside = True
        call()
        self.inside = False
        self._moments.append(self.stamp())

    def waiting(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `call`, which waits for other ranks, without counting its time. Use only while
        :attr:`inside`."""
        self._moments.append(self.stamp())
        result = call(*args, **kwargs)
        self._moments.append(self.stamp())
        return result
