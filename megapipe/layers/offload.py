"""Activations that wait in host memory between the forward and the backward."""

from __future__ import annotations

import weakref
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from megapipe.layers.policy import BlockPolicy
from megapipe.layers.recompute import (
    SavePolicy,
    Segment,
    recompute,
    recompute_except_attention,
    save_all,
)


class ActivationOffload:
    """Keeps the tensors that the segments of one stage save for the backward in host memory.

    On CUDA the host's copies are pinned, and copies run on a side stream; the first tensor that
    the backward of a segment asks for fetches all tensors of that segment, and those of the segment
    before it ahead of their use.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Parcel] | None = None
        self._side: _Side | None = None

    def begin(self) -> None:
        """Begin a forward: its first segment has none before it to fetch ahead."""
        self._last = None

    def offload(
        self,
        inner: SavePolicy,
        segment: Segment,
        x: Tensor,
        /,
        *rest: Any,
        graph_only: bool = False,
    ) -> Tensor:
        """Run `segment` as `inner` does, but keep in host memory the activations that it saves.

        Parameters stay on the device, and so do tensors that need no gradient: tables, masks,
        statistics of norms.
        """
        if not torch.is_grad_enabled():
            return inner(segment, x, *rest, graph_only=graph_only)
        if x.is_cuda and self._side is None:
            self._side = _Side(x.device)
        parcel = _Parcel(self._last, self._side)
        with saved_tensors_hooks(parcel.pack, parcel.unpack):
            y = inner(segment, x, *rest, graph_only=graph_only)
        parcel.close()
        self._last = weakref.ref(parcel)
        return y


class _Side:
    """The stream of the copies of one stage on CUDA, and the pinned memory that they use in turn.

    Memory whose bytes nobody needs any more is taken for the next copy of that size at once, as the
    stream carries the copies out in order. So there is as much of it as is held at a time, however
    far the device is behind, and after the first step none is made: that may wait for all that runs
    on the device, a receive included.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, nbytes: int) -> Tensor:
        """Pinned memory of so many bytes."""
        free = self._free[nbytes]
        return free.pop() if free else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def give_back(self, host: Tensor) -> None:
        """Of these bytes no further copy will begin."""
        self._free[len(host)].append(host)


class _Copy:
    """A storage's bytes in host memory, and on the device again once they are asked for."""

    def __init__(self, storage: torch.UntypedStorage, side: _Side | None) -> None:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device)
        source.set_(storage)
        self.device = storage.device
        self.side: _Side | None = None
        self.fetched: Tensor | None = None
        """The bytes on the device, in memory of the stream that computes."""
        self.arrived: torch.cuda.Event | None = None
        if side is None:
            host = "meta" if source.is_meta else "cpu"
            self.host = torch.empty(len(source), dtype=torch.uint8, device=host)
            self.host.copy_(source)
            return
        self.host, stream = side.take(len(source)), side.stream
        self.side = side  # to which there is something to give back now
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
        source.record_stream(stream)

    def fetch(self) -> None:
        """Begin to copy to the device, unless that has begun."""
        if self.fetched is not None:
            return
        self.fetched = torch.empty_like(self.host, device=self.device)
        if self.side is None:
            self.fetched.copy_(self.host)
            return
        stream = self.side.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))  # used it before
        with torch.cuda.stream(stream):
            self.fetched.copy_(self.host, non_blocking=True)
        self.arrived = stream.record_event()

    def take(self) -> torch.UntypedStorage:
        """The bytes on the device, for the current stream."""
        self.fetch()
        assert self.fetched is not None
        self._await_arrival()
        return self.fetched.untyped_storage()

    def _await_arrival(self) -> None:
        if self.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self.arrived)

    def __del__(self) -> None:
        self._await_arrival()  # of bytes that nobody took: their memory is used again
        if self.side is not None:
            self.side.give_back(self.host)


class _View(NamedTuple):
    """A tensor that was saved, as a view of a copied storage."""

    copy: _Copy
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Parcel:
    """Tensors that one segment saved in one forward. Alive as long as the graph that saved them."""

    def __init__(self, previous: weakref.ref[_Parcel] | None, side: _Side | None) -> None:
        self.previous = previous
        self.side = side
        self.copies: list[weakref.ref[_Copy]] = []
        """Weak: a copy lives as long as the saved tensors that are views of it."""
        self._open: dict[int, tuple[torch.UntypedStorage, _Copy]] = {}
        """Identity -> a storage and its copy; holding it keeps its identity from being given away
        while the segment runs."""

    def pack(self, tensor: Tensor) -> Tensor | _View:
        if isinstance(tensor, Parameter) or not tensor.requires_grad:
            return tensor.detach()
        storage = tensor.untyped_storage()
        identity = storage._cdata  # on the meta device no storage has an address
        if identity not in self._open:
            self._open[identity] = storage, _Copy(storage, self.side)
            self.copies.append(weakref.ref(self._open[identity][1]))
        copy, offset = self._open[identity][1], int(tensor.storage_offset())
        return _View(copy, tensor.dtype, offset, tensor.size(), tensor.stride())

    def close(self) -> None:
        """The segment has run: let go of what it saved."""
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
    """The way of keeping that `policy` has for a module of a block; `host` is the stage's."""
    again: SavePolicy = recompute
    if policy.keeps_attention and module in ("block", "attention"):
        again = recompute_except_attention
    inner = again if module in policy.recompute else save_all
    return partial(host.offload, inner) if module in policy.offload else inner
