"""Reduction of gradients from all replicas to the owners of their shards."""

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
"""Types in which gradients are sent, by ``optimizer.reduce_dtype``; None: as accumulated."""


class Reduction:
    """Sum of a flat array over the axes `shard` and `replicate`; each rank receives one shard.

    Values are summed within the shard group, then shards between groups. The constructor starts the
    first sum, :meth:`advance` the second; neither blocks the computation. With `dtype`, values are
    sent in that type but summed in the type of `grads`: an all-to-all sends each owner its shard,
    and the owner adds in rank order. `grads` must not change until :meth:`wait` returns.
    """

    def __init__(
        self, grads: Tensor, shard: Axis, replicate: Axis, dtype: torch.dtype | None
    ) -> None:
        self._shard = shard
        self._replicate = replicate
        self._values = grads
        self._narrow = dtype if dtype != grads.dtype else None
        self._axes = [axis for axis in (shard, replicate) if axis.group is not None]
        """Axes still to be summed over; the sum over the first one has started."""
        self._arriving = grads
        self._wait: Wait = done
        self._begin()

    def advance(self) -> None:
        """Wait for the sum within the shard group, and start the sum between groups. Do nothing if
        the reduction has only one sum, or if the second sum has started."""
        if len(self._axes) > 1:
            self._complete()
            self._begin()

    def wait(self) -> Tensor:
        """Wait for the summed shard and return it: [n / shard.size]."""
        while self._axes:
            self._complete()
            self._begin()
        return self._values

    def _begin(self) -> None:
        if not self._axes:
            return
        axis = self._axes[0]
        if self._narrow is not None:
            self._arriving, self._wait = start_all_to_all(self._values.to(self._narrow), axis)
        elif axis is self._shard:
            self._arriving, self._wait = start_reduce_scatter(self._values, axis)
        else:
            self._arriving = self._values
            self._wait = start_all_reduce(self._values, axis, in_order=True)

    def _complete(self) -> None:
        axis, dtype = self._axes.pop(0), self._values.dtype
        self._wait()
        if self._narrow is None:
            self._values = self._arriving
            return
        self._values = _add_up(self._arriving, axis, dtype)
        if axis is self._replicate:
            self._values = all_gather(self._values.to(self._narrow), axis).to(dtype)


def _add_up(received: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Add the values received from all ranks of `axis`, in their order: [size * n] -> [n]. `dtype`:
    the number type of the sum."""
    first, *others = received.chunk(axis.size)
    total = first.to(dtype)
    for other in others:
        total += other
    return total
