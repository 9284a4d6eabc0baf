"""The compute time of this rank in each step (:mod:`megapipe.watch.compute_time`)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from megapipe.watch.compute_time import ComputeTime


class ComputeTimes:
    """Measures compute times as host time on a CPU, and as time of the current stream on a GPU.

    On a GPU, time stamps are events, read once the GPU has reached them, so that no host waits.
    """

    def __init__(self, own_time: ComputeTime, device: torch.device) -> None:
        self._own_time = own_time
        self._on_gpu = device.type == "cuda"
        self._steps: deque[list[Any]] = deque()
        """Time stamps of each step, until they are read."""
        self._free: list[torch.cuda.Event] = []
        if self._on_gpu:
            own_time.stamp = self._event

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure the time of a step; a step that fails does not count."""
        self._own_time.start()
        try:
            yield
        finally:
            moments = self._own_time.stop()
        self._steps.append(moments)

    def known(self) -> list[float]:
        """Return the seconds of each step since the last call, without steps in flight on a GPU."""
        found = []
        while self._steps and self._is_known(self._steps[0]):
            found.append(self._seconds(self._steps.popleft()))
        return found

    def _is_known(self, moments: list[Any]) -> bool:
        return not (self._on_gpu and moments) or bool(moments[-1].query())

    def _seconds(self, moments: list[Any]) -> float:
        if not self._on_gpu:
            return float(sum(moments[1::2]) - sum(moments[::2]))
        pairs = zip(moments[::2], moments[1::2], strict=True)
        seconds = sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3
        self._free += moments
        return seconds

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def drop(self) -> None:
        """Drop the steps whose time has not been read."""
        self._steps.clear()
