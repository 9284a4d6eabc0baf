"""Storage of flat arrays of optimizer state, and their copies to the device for an update.

A bf16 array is widened for the update and rounded back afterwards. An array in host memory or on a
disk is copied to the device range by range (state windows): while one window is updated, the next
is copied in on a separate stream, and the previous one is copied back (Rajbhandari et al.,
2104.07857). Copies without pinned memory are synchronous: all copies on the CPU, and copies of a
mapped file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megapipe.errors import not_written

StateDevice = Literal["device", "host", "disk"]
Narrow = Callable[[str, Tensor, Tensor, int], None]
"""Function (array's name, out, wide values, first position) that rounds the values into out."""
LANES = 2
"""Number of state windows that are in flight at a time."""


class MappedFile:
    """Memory-mapped file of zeros. It has no name, so it is deleted when the process ends."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self.memory = mmap.mmap(file.fileno(), nbytes)
        except OSError as error:
            what = f"a file of {nbytes:,} bytes in {folder} (optimizer.offload_folder)"
            raise not_written(f"optimizer.offload=disk: cannot make {what}", error) from None

    def release(self, start: int, stop: int) -> None:
        """Release the memory that caches bytes [start, stop); the file keeps the bytes."""
        start -= start % mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class StateArray:
    """A flat array [n] of optimizer state: new memory of zeros, or `existing` memory.

    `main` is the number type of updates. An `is_offloaded` array is updated in copies on the
    device. A `narrow` array has another type than `main`, and is updated in copies of type `main`.
    """

    def __init__(
        self,
        name: str,
        numel: int,
        dtype: torch.dtype,
        main: torch.dtype,
        device: torch.device,
        place: StateDevice,
        *,
        folder: Path | None = None,
        existing: Tensor | None = None,
    ) -> None:
        self.name = name
        self.place = place
        self.main = main
        self.is_offloaded = place != "device"
        self._file: MappedFile | None = None
        if existing is not None:
            self.values = existing
        elif place == "disk" and numel:
            assert folder is not None, "optimizer state on disk needs a folder"
            self._file = MappedFile(folder, numel * dtype.itemsize)
            self.values = torch.frombuffer(self._file.memory, dtype=dtype)
        elif self.is_offloaded:
            self.values = torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")
        else:
            self.values = torch.zeros(numel, dtype=dtype, device=device)
        self.narrow = self.values.dtype != main

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging buffers per value of a state window."""
        near = LANES * self.values.itemsize if self.is_offloaded else 0
        return near + (self.main.itemsize if self.narrow else 0)

    def release(self, start: int, stop: int) -> None:
        if self._file is not None:
            self._file.release(start * self.values.itemsize, stop * self.values.itemsize)


class CopyStream:
    """A stream for copies next to the compute stream; on the CPU copies are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def begin(self) -> AbstractContextManager[object]:
        """Return a context whose copies run concurrently with the computation."""
        return nullcontext() if self._copying is None else torch.cuda.stream(self._copying)

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event after the copies so far; None on the CPU."""
        return None if self._copying is None else self._copying.record_event()

    def wait_event(self, event: torch.cuda.Event | None) -> None:
        """Make later computation wait for the copies before an event."""
        if event is not None:
            self._computing.wait_event(event)

    def wait_compute(self) -> None:
        """Make later copies wait for the computation so far."""
        if self._copying is not None:
            self._copying.wait_stream(self._computing)

    def compute_waits(self) -> None:
        """Make later computation wait for all copies."""
        if self._copying is not None:
            self._computing.wait_stream(self._copying)


class Staging:
    """Buffers through which state arrays pass for an update, one range after the other.

    For each range in turn: call :meth:`fetch` before the previous range is updated, then
    :meth:`widen`, change the values, and call :meth:`write_back`. At the end, also after an error,
    call :meth:`end`.
    """

    def __init__(
        self,
        arrays: Sequence[StateArray],
        ranges: Sequence[tuple[int, int]],
        device: torch.device,
        copies: CopyStream,
    ) -> None:
        self._arrays = arrays
        self._ranges = ranges
        length = max((b - a for a, b in ranges), default=0)
        self._lanes = [
            [x.values.new_empty(length, device=device) if x.is_offloaded else None for x in arrays]
            for _ in range(min(LANES, len(ranges)))
        ]
        self._wide = [
            torch.empty(length, dtype=x.main, device=device) if x.narrow else None for x in arrays
        ]
        self._copies = copies
        self._copies.wait_compute()
        self._fetched: dict[int, torch.cuda.Event | None] = {}

    def _near(self, index: int) -> list[Tensor]:
        """Return the arrays' values of a range, on the device, in their stored types."""
        a, b = self._ranges[index]
        return [
            x.values[a:b] if buffer is None else buffer[: b - a]
            for x, buffer in zip(self._arrays, self._lanes[index % LANES], strict=True)
        ]

    def fetch(self, index: int) -> None:
        """Start copying range `index` to the device; do nothing if there is no such range."""
        if index >= len(self._ranges):
            return
        a, b = self._ranges[index]
        with self._copies.begin():
            for x, near in zip(self._arrays, self._near(index), strict=True):
                if x.is_offloaded:
                    near.copy_(x.values[a:b], non_blocking=True)
                    x.release(a, b)
        self._fetched[index] = self._copies.record_event()

    def widen(self, index: int) -> list[Tensor]:
        """Return the values of a fetched range, in the type of updates."""
        self._copies.wait_event(self._fetched.pop(index))
        return [
            near if wide is None else wide[: len(near)].copy_(near)
            for near, wide in zip(self._near(index), self._wide, strict=True)
        ]

    def write_back(self, index: int, narrow: Narrow) -> None:
        """Store the updated values of a range from :meth:`widen`; narrow arrays are rounded."""
        a, b = self._ranges[index]
        near = self._near(index)
        for x, kept, wide in zip(self._arrays, near, self._wide, strict=True):
            if wide is not None:
                narrow(x.name, kept, wide[: b - a], a)
        self._copies.wait_compute()
        with self._copies.begin():
            for x, kept in zip(self._arrays, near, strict=True):
                if x.is_offloaded:
                    x.values[a:b].copy_(kept, non_blocking=True)
                    x.release(a, b)

    def end(self) -> None:
        self._copies.compute_waits()
