"""Measures which tensor memory is alive, with a finaliser on every storage that is made."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = torch.ops.aten.empty.memory_format


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results of an operation; torch's own way through trees
    of values costs several times as much."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for each in values:
            yield from tensors_in(each)
    elif isinstance(values, dict):
        yield from tensors_in([*values.values()])


class LiveStorage(NamedTuple):
    """A storage that is alive."""

    bytes: int
    in_host: bool
    """An activation's copy in host memory: these are the tensors made by ``empty`` as uint8."""


class LiveStorages(TorchDispatchMode):
    """Records the storages that are made while it is entered, and knows which of them are alive.

    It may be entered several times. Storages of `known` tensors are left out. Since it slows
    operations down it is for tests and measurements.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known: dict[int, torch.UntypedStorage] = {}
        self.know(known)
        self._alive: dict[int, LiveStorage] = {}
        self.bytes = 0
        """Bytes of all storages alive, without copies in host memory."""
        self.peak = 0
        """The most that `bytes` was, also within operations; callers may reset it to `bytes`."""

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of these tensors out from now on."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = storage

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count(func, out)
        return out

    def count(self, func: Any, out: Any) -> None:
        """Count the storages that `func` has made, of which `out` came."""
        for tensor in tensors_in(out):
            self._note(tensor, in_host=func is _EMPTY and tensor.dtype == torch.uint8)

    def _note(self, tensor: Tensor, *, in_host: bool) -> None:
        storage = tensor.untyped_storage()
        name, size = id(storage), storage.nbytes()
        if name in self._alive or not size or storage._cdata in self._known:
            return
        self._alive[name] = LiveStorage(size, in_host)
        if not in_host:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._free, name)

    def _free(self, name: int) -> None:
        gone = self._alive.pop(name)
        if not gone.in_host:
            self.bytes -= gone.bytes

    @property
    def alive(self) -> Mapping[int, LiveStorage]:
        """Each storage that is alive, by the `id` of its ``untyped_storage()``."""
        return self._alive

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is alive, ascending, without copies in host memory."""
        return sorted(live.bytes for live in self._alive.values() if not live.in_host)

    @property
    def host_sizes(self) -> list[int]:
        """Bytes of each copy in host memory that is alive, ascending."""
        return sorted(live.bytes for live in self._alive.values() if live.in_host)
