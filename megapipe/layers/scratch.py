"""Typed storage for values that layers attach to a micro-batch, without fields in MicroBatch.

A layer's file defines a key for each kind of value, as a constant::

    SCORES = ScratchKey[Tensor]("scores")
    microbatch.scratch.by_layer(SCORES)[3] = scores  # of layer 3
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ScratchKey(Generic[T]):
    """Key of one kind of value, of type T for each layer."""

    def __init__(self, name: str) -> None:
        self.name = name


class Scratch(dict[ScratchKey[Any], dict[int, Any]]):
    """Values by key and layer. The class is a dict, so that making one for each micro-batch costs
    no Python call."""

    def by_layer(self, key: ScratchKey[T]) -> dict[int, T]:
        """Return the values of `key` by layer; writing to the dictionary stores values."""
        found = self.get(key)
        if found is None:
            found = self[key] = {}
        return found
