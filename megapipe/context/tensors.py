"""Shapes and types of the tensors that ranks send each other in context-parallel attention.

The executor (:mod:`megapipe.layers.ring_attention`) allocates receive buffers and accumulators by
:class:`RingTensors`; the choice between context-parallel methods counts the same bytes.
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
    """Whether the tensor has the accumulators' type (fp32, or fp64 for an fp64 model)."""


class RingTensors(NamedTuple):
    """Shapes of a ring member's queries and keys, and of the tensors that members send."""

    queries: Shape
    """Shape [s, b, heads, d] of queries, outputs and gradients of queries."""
    keys: Shape
    """Shape [t, b, groups, d] of keys, values and their gradients."""

    def carried(self, what: What, kind: Kind, *, backward: bool) -> tuple[RingTensor, ...]:
        """List the tensors of a message in the order of sending. `what` says whether the message
        carries the queries or keys themselves, a partial result or gradients; `backward`, whether
        it is sent in the backward."""
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
        """List the tensors that a member sends to each other member if keys are all-gathered: keys
        and values, and in the backward the gradients of the other member's keys and values."""
        gradients = self.carried("gradient", "keys", backward=True) if backward else ()
        return self.carried("bundle", "keys", backward=backward) + gradients

    @property
    def exchanged(self) -> tuple[RingTensor, ...]:
        """Tensors of the Ulysses all-to-alls, one for each: queries, keys, values and output in the
        forward, or their gradients in the backward."""
        q, k = RingTensor(self.queries), RingTensor(self.keys)
        return q, k, k, q


def size_of(tensors: Iterable[RingTensor], dtype: Dtype) -> int:
    """Count the bytes of tensors if the model's type is `dtype`."""
    sizes = {False: DTYPE_BYTES[dtype], True: main_bytes(dtype)}
    return sum(prod(each.shape) * sizes[each.main] for each in tensors)


def split_groups(groups: int, ulysses: int) -> int:
    """Return the number of KV heads that `ulysses` ranks split. If there are fewer heads than
    ranks, heads are repeated, so that each rank has one."""
    return max(groups, ulysses)
