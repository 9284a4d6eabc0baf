"""The interface of what has a state that checkpoints keep."""

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
    """Global tensors to be read by regions: a checkpoint, or what takes the place of one."""

    @property
    def path(self) -> StorageLocation:
        """Where it is."""

    @property
    def config(self) -> Mapping[str, JsonValue]:
        """Keys of the run's configuration, those of the model at least."""

    def match(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError unless it has exactly these tensors, ``model/...``."""

    def read_into(self, out: Tensor, name: str, region: Region) -> None:
        """Fill `out`, on the host, with a region of a tensor; raises CheckpointError."""


class Stateful:
    """Has a state that checkpoints keep; derive from it and override the parts that exist.

    A checkpoint has a small part, as JSON, and tensors. A save asks each member of a run for
    :meth:`state` and :meth:`tensors`. A load gives each its :meth:`load`, then each its
    :meth:`read`: which tensors a rank reads may depend on what is small. All ranks do so in the
    same order, so that these two may communicate.
    """

    name: ClassVar[str] = ""
    """Key of the small part in a checkpoint, and beginning of the names of :meth:`buffers`. Empty:
    there is neither."""
    kind: ClassVar[Any] = JsonValue
    """Type of the small part, which pydantic checks before :meth:`load`."""
    shared: ClassVar[bool] = True
    """Whether all ranks have the same tensors, so that rank 0 alone writes them."""

    def state(self) -> JsonValue:
        """Return the small part; None: nothing is kept."""
        return None

    def load(self, stored: Any) -> None:
        """Go on from a small part, of type :attr:`kind`; None: the checkpoint has none. It may be
        called twice. Raises ValueError for what cannot be."""

    def buffers(self) -> Mapping[str, Tensor]:
        """Return tensors that all ranks have alike, of any shape and device, by a name of each; a
        load fills those that a checkpoint has."""
        return {}

    def tensors(self) -> Iterator[Piece]:
        """Yield this rank's part of the tensors, as views: here :meth:`buffers`."""
        for name, tensor in self._named():
            yield Piece(name, tuple(tensor.shape), whole(tuple(tensor.shape)), tensor)

    def entries(self) -> Iterable[str]:
        """Return names of entries that :meth:`read` reads, the whole of each."""
        return [name for name, _ in self._named()]

    def read(self, weights: TensorReader, names: Collection[str]) -> None:
        """Read the tensors, as far as they are among the `names` of what is there."""
        for name, tensor in self._named():
            if name in names:
                out = torch.empty_like(tensor, device="cpu")
                weights.read_into(out, name, whole(tuple(tensor.shape)))
                tensor.copy_(out)

    def read_weights(self, weights: TensorReader) -> None:
        """Read what belongs to the weights, where these alone are loaded."""

    def saved(self) -> None:
        """Take note that the state of a run was asked for by a save."""

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers by the names of their entries."""
        for name, tensor in self.buffers().items():
            yield f"{self.name}/{name}", tensor.detach()
