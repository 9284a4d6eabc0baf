"""Transfers from the host to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment in bytes of tensors that share a buffer, so that each can be viewed in its type."""


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return host `tensor` on `device`; the host does not wait for a copy to a GPU.

    The copy is made from pinned memory, which torch does not reuse before the copy is done.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Uploads:
    """Copies host tensors to a device on a stream of its own, ahead of their use.

    Copies alternate between two halves of pinned memory, which grows as needed. If the device is
    not a GPU, a copy is made when the tensors are taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned = torch.empty(2, 0, dtype=torch.uint8)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        """For each half of the pinned memory, the end of the latest copy from it."""
        self._turn = 0

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start to copy. The returned function returns the tensors on the device, ready for the
        stream that is current when the function is called."""
        if self._stream is None:
            return lambda: [tensor.to(self._device) for tensor in tensors]
        byte_ranges, stop = [], 0
        for tensor in tensors:
            byte_ranges.append(slice(stop, stop + tensor.nbytes))
            stop += aligned(tensor.nbytes)
        host = self._free_half(stop)[:stop]
        for byte_range, tensor in zip(byte_ranges, tensors, strict=True):
            host[byte_range].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        with torch.cuda.stream(self._stream):
            near = torch.empty_like(host, device=self._device)
            near.copy_(host, non_blocking=True)
        copied = self._stream.record_event()
        self._copied[self._turn] = copied
        self._turn = 1 - self._turn

        def take() -> list[Tensor]:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            near.record_stream(current)
            return [
                near[byte_range].view(tensor.dtype).view(tensor.shape)
                for byte_range, tensor in zip(byte_ranges, tensors, strict=True)
            ]

        return take

    def _free_half(self, nbytes: int) -> Tensor:
        """Return the half of the pinned memory to use next, once the copy from it is complete."""
        if self._pinned.shape[1] < nbytes:  # torch keeps the old memory until its copy is complete
            self._pinned = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
            self._copied = [None, None]
        copied = self._copied[self._turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        return self._pinned[self._turn]
