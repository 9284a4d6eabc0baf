"""Which tensor memory is alive, measured: a finaliser on every storage that an operation makes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """While it is entered, notes every new storage; then knows which of them are alive.

    It may be entered several times. Storages of `known` tensors are left out. It slows operations
    down: it is for tests and measurements.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._alive: dict[int, tuple[int, bool]] = {}

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
        self._alive[name] = size, tensor.dtype == torch.uint8
        weakref.finalize(storage, self._alive.pop, name, None)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is alive, ascending, without those made as bytes."""
        return sorted(size for size, is_bytes in self._alive.values() if not is_bytes)

    @property
    def byte_sizes(self) -> list[int]:
        """The same of those made as bytes, as copies in host memory are."""
        return sorted(size for size, is_bytes in self._alive.values() if is_bytes)
