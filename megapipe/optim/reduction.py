"""Gradients on their way from every replica to the owners of their slices."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.mesh import Axis
from megapipe.tensor_parallel.collectives import (
    Wait,
    all_gather,
    all_reduce,
    done,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)


class Reduction:
    """The sum of a flat array over shard x replicate, of which this rank gets its slice.

    Begins when it is made, and does not hold up the computation. With `dtype` values travel in
    that type and are added up in their own: pieces are exchanged, then each owner adds its own
    in rank order. `grads` must stay untouched until :meth:`wait` returns.
    """

    def __init__(
        self, grads: Tensor, shard: Axis, replicate: Axis, dtype: torch.dtype | None
    ) -> None:
        self._shard = shard
        self._replicate = replicate
        self._grads = grads
        self._narrow = dtype if dtype != grads.dtype else None
        self._piece = grads
        self._wait: Wait = done
        first = shard if shard.group is not None else replicate
        if first.group is None:
            return
        if self._narrow is not None:
            self._piece, self._wait = start_all_to_all(grads.to(self._narrow), first)
        elif shard.group is not None:
            self._piece, self._wait = start_reduce_scatter(grads, shard)
        else:
            self._wait = start_all_reduce(grads, replicate)

    def wait(self) -> Tensor:
        """The summed slice, once it is complete: [n / shard.size]."""
        self._wait()
        if self._narrow is None:
            if self._shard.group is not None:
                all_reduce(self._piece, self._replicate)
            return self._piece
        if self._shard.group is not None:
            piece = _add_up(self._piece, self._shard, self._grads.dtype)
            if self._replicate.group is None:
                return piece
            received, wait = start_all_to_all(piece.to(self._narrow), self._replicate)
            wait()
        elif self._replicate.group is not None:
            received = self._piece
        else:
            return self._grads
        own = _add_up(received, self._replicate, self._grads.dtype).to(self._narrow)
        return all_gather(own, self._replicate).to(self._grads.dtype)


def _add_up(received: Tensor, axis: Axis, dtype: torch.dtype) -> Tensor:
    """Add what the members sent, one after the other, in `dtype`: [size * n] -> [n]."""
    first, *others = received.chunk(axis.size)
    total = first.to(dtype)
    for other in others:
        total += other
    return total
