"""Activations that are offloaded to host memory between forward and backward."""

from __future__ import annotations

import weakref
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from megapipe.layers.activation_policy import BlockPolicy
from megapipe.layers.recompute import (
    SavePolicy,
    Segment,
    recompute,
    recompute_except_attention,
    save_all,
)


class ActivationOffload:
    """Offloads to host memory the tensors that the segments of one stage save for the backward.

    On CUDA the host's copies are pinned, and copies run on a side stream. As soon as a segment's
    backward needs one of its tensors, all tensors of the segment are fetched, and the tensors of
    the previous segment are prefetched.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Parcel] | None = None
        self._side: _Side | None = None

    def begin(self) -> None:
        """Start a forward, whose first segment has no previous segment to prefetch."""
        self._last = None

    def offload(
        self,
        inner: SavePolicy,
        segment: Segment,
        x: Tensor,
        /,
        *rest: Any,
        skip_output: bool = False,
    ) -> Tensor:
        """Run `segment` with the policy `inner`, but offload the activations that it saves.

        Parameters stay on the device, and so do tensors that need no gradient, such as rotary
        tables, masks and norm statistics.
        """
        if not torch.is_grad_enabled():
            return inner(segment, x, *rest, skip_output=skip_output)
        if x.is_cuda and self._side is None:
            self._side = _Side(x.device)
        parcel = _Parcel(self._last, self._side)
        with saved_tensors_hooks(parcel.pack, parcel.unpack):
            y = inner(segment, x, *rest, skip_output=skip_output)
        parcel.close()
        self._last = weakref.ref(parcel)
        return y


class _Side:
    """Side stream for the copies of one stage on CUDA, and the pool of pinned memory that they use.

    The stream runs copies in order, so pinned memory that is returned serves the next copy of the
    same size at once. So the pool is as large as the activations offloaded at a time, however far
    the device is behind. After the first step nothing is allocated: an allocation may wait for all
    running work on the device, receives included.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """Return pinned memory of `nbytes` bytes, from the pool if possible."""
        free = self._free[nbytes]
        return free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def release(self, host: Tensor) -> None:
        """Return pinned memory to the pool: no further copy will read or write it."""
        self._free[len(host)].append(host)


class _Copy:
    """Host copy of a storage's bytes, which are fetched to the device when needed."""

    def __init__(self, storage: torch.UntypedStorage, side: _Side | None) -> None:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage)
        self.device = storage.device
        self.side: _Side | None = None
        self.fetched: Tensor | None = None
        """Bytes on the device, in memory of the compute stream; None until they are fetched."""
        self.arrived: torch.cuda.Event | None = None
        if side is None:
            host = "meta" if source.is_meta else "cpu"
            self.host = torch.empty(len(source), dtype=torch.uint8, device=host)
            self.host.copy_(source)
            return
        self.host, stream = side.take(len(source)), side.stream
        self.side = side  # from now on there is memory to give back
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def fetch(self) -> None:
        """Start to copy the bytes to the device, unless the copy has started."""
        if self.fetched is not None:
            return
        self.fetched = torch.empty_like(self.host, device=self.device)
        if self.side is None:
            self.fetched.copy_(self.host)
            return
        stream = self.side.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))  # which used the memory before
        with torch.cuda.stream(stream):
            self.fetched.copy_(self.host, non_blocking=True)
        self.arrived = stream.record_event()

    def take(self) -> torch.UntypedStorage:
        """Return the storage on the device, ready for the current stream."""
        self.fetch()
        assert self.fetched is not None
        self._await_arrival()
        return self.fetched.untyped_storage()

    def _await_arrival(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)

    def __del__(self) -> None:
        self._await_arrival()  # fetched bytes may not have been taken, and their memory is reused
        if self.side is not None:
            self.side.release(self.host)


class _View(NamedTuple):
    """A saved tensor, as a view of a copied storage."""

    copy: _Copy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Parcel:
    """Tensors that one segment saved in one forward; they live as long as the segment's graph."""

    def __init__(self, previous: weakref.ref[_Parcel] | None, side: _Side | None) -> None:
        self.previous = previous
        self.side = side
        self.copies: list[weakref.ref[_Copy]] = []
        """Weak references: a copy lives as long as the saved tensors that are views of it."""
        self._open: dict[int, tuple[torch.UntypedStorage, _Copy]] = {}
        """Each storage and its copy, by the storage's identity. Holding the storage prevents reuse
        of the identity while the segment runs."""

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if isinstance(tensor, Parameter) or not tensor.requires_grad:
            return tensor.detach()
        storage = tensor.untyped_storage()
        identity = storage._cdata  # on the meta device storages have no address
        if identity not in self._open:
            self._open[identity] = storage, _Copy(storage, self.side)
            self.copies.append(weakref.ref(self._open[identity][1]))
        copy, offset = self._open[identity][1], int(tensor.storage_offset())
        return _View(copy, tensor.dtype, offset, tensor.size(), tensor.stride())

    def close(self) -> None:
        """Free the storages that were held while the segment ran."""
        self._open.clear()

    def fetch(self) -> None:
        for reference in self.copies:
            if (copy := reference()) is not None:
                copy.fetch()

    def unpack(self, packed: Tensor | _View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.side is not None and packed.copy.fetched is None:
            self.fetch()
            if self.previous is not None and (previous := self.previous()) is not None:
                previous.fetch()
        tensor = torch.empty(0, dtype=packed.dtype, device=packed.copy.device)
        storage = packed.copy.take()
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)


def save_policy(policy: BlockPolicy, module: str, host: ActivationOffload) -> SavePolicy:
    """Return the SavePolicy of a block's `module` under `policy`. `host` is the stage's offload."""
    recompute_policy: SavePolicy = recompute
    if policy.saves_attention and module in ("block", "attention"):
        recompute_policy = recompute_except_attention
    inner = recompute_policy if module in policy.recompute else save_all
    return partial(host.offload, inner) if module in policy.offload else inner
