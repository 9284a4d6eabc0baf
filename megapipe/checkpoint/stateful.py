"""The interface of objects with state that checkpoints store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol

import torch
from pydantic import JsonValue
from torch import Tensor

from megapipe.checkpoint.regions import Region, whole
from megapipe.checkpoint.storage import StorageLocation
from megapipe.checkpoint.writer import Piece


class TensorReader(Protocol):
    """Global tensors that are read by regions: a checkpoint, or something equivalent."""

    @property
    def path(self) -> StorageLocation:
        """Location of the tensors."""

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Configuration of the run, or at least the keys of the section `model`."""

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless exactly these tensors, ``model/...``, are stored."""

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill `out`, a host tensor, with a region of a tensor, or raise CheckpointError."""


class Stateful:
    """Base of objects with state that checkpoints store; override the methods that apply.

    The state has a small part, as JSON, and tensors. A save calls :meth:`state` and :meth:`tensors`
    of each object. A load calls :meth:`load` of each object, then :meth:`read` of each: which
    tensors a rank reads may depend on the small parts. All ranks call these methods of all objects
    in the same order, so that :meth:`load` and :meth:`read` may communicate.
    """

    name: ClassVar[str] = ""
    """Key of the small part in a checkpoint, and prefix of the names of :meth:`buffers`. Empty if
    the object has neither."""
    kind: ClassVar[Any] = JsonValue
    """Type of the small part, which pydantic validates before :meth:`load`."""
    shared: ClassVar[bool] = True
    """Whether the tensors are equal on all ranks, so that only rank 0 writes them."""

    def state(self) -> JsonValue:
        """Return the small part of the state; None if there is nothing to store."""
        return None

    def load(self, stored: Any) -> None:
        """Restore the small part, of type :attr:`kind`; `stored` is None if the checkpoint has
        none. A load may call this method twice. Raises ValueError for impossible values."""

    def buffers(self) -> Mapping[str, Tensor]:
        """Return tensors by name, of any shape and device, that are equal on all ranks. A load
        fills each of these tensors that the checkpoint has."""
        return {}

    def tensors(self) -> Iterator[Piece]:
        """Yield the pieces that this rank saves, as views; by default all :meth:`buffers`."""
        for name, tensor in self._named():
            yield Piece(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor)

    def entries(self) -> Iterable[str]:
        """Return the names of the checkpoint's entries that :meth:`read` reads completely."""
        return [name for name, _ in self._named()]

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Fill the tensors of this object from the checkpoint `weights`. `names`: all entries that
        the checkpoint has; tensors without an entry stay as they are."""
        for name, tensor in self._named():
            if name in names:
                out = torch.empty_like(tensor, device="cpu")
                weights.read_into(out, name, whole(tuple(tensor.shape)))
                tensor.copy_(out)

    def read_weights(self, weights: TensorReader) -> None:
        """Read the part of the state that belongs to the model's weights. This method replaces
        :meth:`load` and :meth:`read` if a run loads only weights from a checkpoint."""

    def saved(self) -> None:
        """React to a save. It has called :meth:`state`, but may not have copied the tensors yet. A
        run that resumes from the save must continue as this one does."""

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each buffer with the name of its entry in the checkpoint."""
        for name, tensor in self.buffers().items():
            yield f"{self.name}/{name}", tensor.detach()
