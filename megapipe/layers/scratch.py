"""Scratch: values that layers store beside a micro-batch, typed, without it knowing of the layers.

A layer's file makes a key for each kind of value, as a constant::

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
    """Values by key and layer, kept as long as this object. It is made for each micro-batch, so
    that making it costs no Python call."""

    def by_layer(self, key: ScratchKey[T]) -> dict[int, T]:
        """Return the values of `key` by layer; what is put into the dictionary is stored."""
        found = self.get(key)
        if found is None:
            found = self[key] = {}
        return found
