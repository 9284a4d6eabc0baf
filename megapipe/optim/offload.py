"""Where flat arrays of optimizer state live, and the windows through which an update sees them.

An array of another type than the update's is widened for it and rounded back after. One in host
memory or on a disk is copied to the device window by window: while one window is updated the next
is on its way, on a stream of its own, and the one before goes back (Rajbhandari et al.,
2104.07857). Copies that are not from pinned memory are made one after the other: those on the CPU,
and those of a mapped file.
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
"""(an array's name, out, wide values, the place of the first) rounds the values into out."""
LANES = 2
"""Ranges on their way at a time."""


class MappedFile:
    """Zeros in a file that has no name: no other run finds it, and it ends with the process."""

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
        """Let go of the memory behind bytes [start, stop); the file keeps them."""
        start -= start % mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_DONTNEED, start, stop - start)


class StateArray:
    """A flat array [n] of state, zeros at first, or `given` memory.

    If it `is_offloaded` from the device, an update works on copies there; if it is `narrow`, of
    another type than the update's, on copies in that type.
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
        given: Tensor | None = None,
    ) -> None:
        self.name = name
        self.place = place
        self.main = main
        self.is_offloaded = place != "device"
        self._file: MappedFile | None = None
        if given is not None:
            self.values = given
        elif place == "disk" and numel:
            assert folder is not None, "state on a disk needs a folder"
            self._file = MappedFile(folder, numel * dtype.itemsize)
            self.values = torch.frombuffer(self._file.memory, dtype=dtype)
        elif self.is_offloaded:
            self.values = torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")
        else:
            self.values = torch.zeros(numel, dtype=dtype, device=device)
        self.narrow = self.values.dtype != main

    @property
    def staging_bytes(self) -> int:
        """Bytes of a window's buffers for each of its values."""
        near = LANES * self.values.itemsize if self.is_offloaded else 0
        return near + (self.main.itemsize if self.narrow else 0)

    def release(self, start: int, stop: int) -> None:
        if self._file is not None:
            self._file.release(start * self.values.itemsize, stop * self.values.itemsize)


class CopyStream:
    """A stream for copies beside the one that computes; on the CPU all is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def begin(self) -> AbstractContextManager[object]:
        """A context: copies within it run beside the computation."""
        return nullcontext() if self._copying is None else torch.cuda.stream(self._copying)

    def record_event(self) -> torch.cuda.Event | None:
        """The copies up to here."""
        return None if self._copying is None else self._copying.record_event()

    def wait_event(self, mark: torch.cuda.Event | None) -> None:
        """The computation from here on waits for these copies."""
        if mark is not None:
            self._computing.wait_event(mark)

    def wait_compute(self) -> None:
        """Copies from here on wait for the computation up to here."""
        if self._copying is not None:
            self._copying.wait_stream(self._computing)

    def compute_waits(self) -> None:
        """The computation from here on waits for all copies."""
        if self._copying is not None:
            self._computing.wait_stream(self._copying)


class Staging:
    """The buffers through which the ranges of some arrays pass, one after the other.

    For each range in turn: :meth:`fetch` it before the previous range is updated, :meth:`widen` it,
    change the values, :meth:`write_back`. At the end, also after an error, :meth:`end`.
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
        """The values of a range on the device, in the type in which they are kept."""
        a, b = self._ranges[index]
        return [
            x.values[a:b] if buffer is None else buffer[: b - a]
            for x, buffer in zip(self._arrays, self._lanes[index % LANES], strict=True)
        ]

    def fetch(self, index: int) -> None:
        """Begin to copy a range to the device, if there is one of this number."""
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
        """The values of a fetched range, in the update's type."""
        self._copies.wait_event(self._fetched.pop(index))
        return [
            near if wide is None else wide[: len(near)].copy_(near)
            for near, wide in zip(self._near(index), self._wide, strict=True)
        ]

    def write_back(self, index: int, narrow: Narrow) -> None:
        """Store the values of :meth:`widen`, which the update has changed, rounded where narrow."""
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
