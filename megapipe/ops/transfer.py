"""From the host to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 16
"""Tensors that travel as one begin at multiples of so many bytes, so that each can be seen as its
own type."""


def aligned(nbytes: int) -> int:
    """`nbytes` and what is left free up to the next tensor."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which is in host memory, on `device`; a copy to a GPU is not waited for.

    The copy is made from pinned memory, which torch does not reuse before the copy is done.
    """
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Uploads:
    """Copies of host tensors to a device, made on a stream of their own ahead of their use.

    They leave from the halves of pinned memory in turn, which grows to what is asked of it. Only
    for a GPU are they ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned = torch.empty(2, 0, dtype=torch.uint8)
        self._copied: list[torch.cuda.Event | None] = [None, None]
        """The end of the last copy from each half."""
        self._turn = 0

    def start(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begin to copy; the function that is returned gives the tensors on the device, for what is
        then the current stream."""
        if self._stream is None:
            return lambda: [tensor.to(self._device) for tensor in tensors]
        places, stop = [], 0
        for tensor in tensors:
            places.append(slice(stop, stop + tensor.nbytes))
            stop += aligned(tensor.nbytes)
        host = self._free_half(stop)[:stop]
        for place, tensor in zip(places, tensors, strict=True):
            host[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
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
                near[place].view(tensor.dtype).view(tensor.shape)
                for place, tensor in zip(places, tensors, strict=True)
            ]

        return take

    def _free_half(self, nbytes: int) -> Tensor:
        """The half whose turn it is, once the copy from it is over."""
        if self._pinned.shape[1] < nbytes:  # torch keeps what is copied from until that is over
            self._pinned = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
            self._copied = [None, None]
        copied = self._copied[self._turn]
        if copied is not None and not copied.query():
            copied.synchronize()
        return self._pinned[self._turn]
