"""Gradients on their way from every replica to the owners of their slices."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.distributed.collectives import (
    Wait,
    all_gather,
    done,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from megapipe.distributed.mesh import Axis

REDUCE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""Types in which gradients travel, by ``optimizer.reduce_dtype``; None: that of the main ones."""


class Reduction:
    """The sum of a flat array over shard x replicate, of which this rank gets its slice.

    Values are summed within the shard group, then slices between groups: the constructor begins
    the first sum that there is, :meth:`advance` the second; neither holds up the computation. With
    `dtype` values travel in that type and are added up in their own: an all-to-all brings each
    owner its slice's values, which it adds in rank order. `grads` must stay untouched until
    :meth:`wait` returns.
    """

    def __init__(
        self, grads: Tensor, shard: Axis, replicate: Axis, dtype: torch.dtype | None
    ) -> None:
        self._shard = shard
        self._replicate = replicate
        self._values = grads
        self._narrow = dtype if dtype != grads.dtype else None
        self._hops = [axis for axis in (shard, replicate) if axis.group is not None]
        """The axes still to be summed over; the sum over the first one has begun."""
        self._arriving = grads
        self._wait: Wait = done
        self._begin()

    def advance(self) -> None:
        """Where there are two sums, wait for that within the shard group and begin the other."""
        if len(self._hops) > 1:
            self._complete()
            self._begin()

    def wait(self) -> Tensor:
        """The summed slice, once it is complete: [n / shard.size]."""
        while self._hops:
            self._complete()
            self._begin()
        return self._values

    def _begin(self) -> None:
        if not self._hops:
            return
        axis = self._hops[0]
        if self._narrow is not None:
            self._arriving, self._wait = start_all_to_all(self._values.to(self._narrow), axis)
        elif axis is self._shard:
            self._arriving, self._wait = start_reduce_scatter(self._values, axis)
        else:
            self._arriving = self._values
            self._wait = start_all_reduce(self._values, axis, in_order=True)

    def _complete(self) -> None:
        axis, dtype = self._hops.pop(0), self._values.dtype
        self._wait()
        if self._narrow is None:
            self._values = self._arriving
            return
        self._values = _add_up(self._arriving, axis, dtype)
        if axis is self._replicate:
            self._values = all_gather(self._values.to(self._narrow), axis).to(dtype)


def _add_up(received: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Add what the members sent, one after the other, in `dtype`: [size * n] -> [n]."""
    first, *others = received.chunk(axis.size)
    total = first.to(dtype)
    for other in others:
        total += other
    return total
