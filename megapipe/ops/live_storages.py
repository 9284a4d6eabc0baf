"""Measures which tensor memory is alive, with a finaliser on every new storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = torch.ops.aten.empty.memory_format


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results of an operation, several times faster than
    torch's pytree functions."""
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
    """Whether the storage holds an offloaded activation: a uint8 tensor made by ``empty``."""


class LiveStorages(TorchDispatchMode):
    """Context that records the storages made inside it, and which storages are alive.

    The context may be entered several times. Storages of `known` tensors are not counted. Recording
    slows operations down, so it is for tests and measurements.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known: dict[int, torch.UntypedStorage] = {}
        self.know(known)
        self._alive: dict[int, LiveStorage] = {}
        self.bytes = 0
        """Bytes of all live storages, without offloaded activations."""
        self.peak = 0
        """Largest value of `bytes` so far, with temporaries; callers may reset it to `bytes`."""

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of `tensors`, as if they existed before."""
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
        """Count the new storages in `out`, the result of `func`."""
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
        """Live storages, by the `id` of their ``untyped_storage()``."""
        return self._alive

    @property
    def sizes(self) -> list[int]:
        """Bytes of each live storage, ascending, without offloaded activations."""
        return sorted(live.bytes for live in self._alive.values() if not live.in_host)

    @property
    def host_sizes(self) -> list[int]:
        """Bytes of each live offloaded activation, ascending."""
        return sorted(live.bytes for live in self._alive.values() if live.in_host)
