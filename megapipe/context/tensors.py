"""Tensors that ranks send each other while they attend to split positions: shapes and types.

The executor (:mod:`megapipe.layers.ring_attention`) allocates what it receives and what it sums up
as :class:`RingTensors` says, and a choice between ways to attend counts the bytes of the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from megapipe.context.plan import Kind, What
from megapipe.util.dtypes import DTYPE_BYTES, Dtype, main_bytes

Shape = tuple[int, ...]


class RingTensor(NamedTuple):
    """Shape and type of one tensor."""

    shape: Shape
    main: bool = False
    """Whether the type is that of accumulation, or else the model's."""


class RingTensors(NamedTuple):
    """Tensors of a member of a ring."""

    queries: Shape
    """[s, b, heads, d], which outputs and gradients of queries have too."""
    keys: Shape
    """[t, b, groups, d], which values and gradients of keys and values have too."""

    def carried(self, what: What, kind: Kind, *, backward: bool) -> tuple[RingTensor, ...]:
        """List the tensors of a message of the forward or the backward, in their order."""
        s, b, heads, _ = self.queries
        q, k = self.queries, self.keys
        lse = RingTensor((b, heads, s), main=True)
        if what == "partial":
            return RingTensor(q, main=True), lse
        if what == "gradient":
            return tuple(RingTensor(x, main=True) for x in ((q,) if kind == "queries" else (k, k)))
        if kind == "keys":
            return RingTensor(k), RingTensor(k)
        if not backward:
            return (RingTensor(q),)
        return RingTensor(q), RingTensor(q), lse, RingTensor((s, b, heads), main=True)

    def gathered(self, *, backward: bool) -> tuple[RingTensor, ...]:
        """List what goes from a member to each of the others where keys are gathered at once: keys
        and values, and in the backward the gradients of the other's."""
        gradients = self.carried("gradient", "keys", backward=True) if backward else ()
        return self.carried("bundle", "keys", backward=backward) + gradients

    @property
    def exchanged(self) -> tuple[RingTensor, ...]:
        """Queries, keys, values and output, or their gradients: ranks that split heads exchange
        each by an all-to-all."""
        q, k = RingTensor(self.queries), RingTensor(self.keys)
        return q, k, k, q


def size_of(tensors: Iterable[RingTensor], dtype: Dtype) -> int:
    """Count the bytes of tensors of a model in `dtype`."""
    sizes = {False: DTYPE_BYTES[dtype], True: main_bytes(dtype)}
    return sum(prod(each.shape) * sizes[each.main] for each in tensors)


def split_groups(groups: int, ulysses: int) -> int:
    """Count the key heads that `ulysses` ranks split: each has one, so there may be copies."""
    return max(groups, ulysses)
