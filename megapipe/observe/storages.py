"""Which tensor memory is alive, measured: a finaliser on every storage that an operation makes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(NamedTuple):
    """A storage that is alive."""

    bytes: int
    made_as_bytes: bool
    """As copies in host memory are."""


class LiveStorages(TorchDispatchMode):
    """While it is entered, notes every new storage; then knows which of them are alive.

    It may be entered several times. Storages of `known` tensors are left out. It slows operations
    down: it is for tests and measurements.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: dict[int, Live] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        name, size = id(storage), storage.nbytes()
        if name in self._alive or not size or storage.data_ptr() in self._known:
            return
        self._alive[name] = Live(size, tensor.dtype == torch.uint8)
        weakref.finalize(storage, self._alive.pop, name, None)

    @property
    def alive(self) -> Mapping[int, Live]:
        """Each storage that is alive, by the `id` of its ``untyped_storage()``."""
        return self._alive

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is alive, ascending, without those made as bytes."""
        return sorted(live.bytes for live in self._alive.values() if not live.made_as_bytes)

    @property
    def byte_sizes(self) -> list[int]:
        """The same of those made as bytes, as copies in host memory are."""
        return sorted(live.bytes for live in self._alive.values() if live.made_as_bytes)
