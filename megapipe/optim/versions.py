"""Versions of the weights of a bucket, which the operations of a pipeline without a flush read.

A version is a flat buffer. An update writes the oldest one, which nobody reads any more, and no
buffer is ever moved: what is in flight points into it. Where an operation reads another version
than the one before it, the parameters are pointed at that.
"""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import torch
from torch import Tensor

from megapipe.optim.shard import Shard


class Versions:
    """The newest `kept` versions of a shard's bucket.

    `turns`: gradients of one window wait for their update while those of the next come in, so there
    are two accumulators.
    """

    def __init__(self, shard: Shard, kept: int, *, turns: bool) -> None:
        self.shard = shard
        bucket = shard.bucket
        others = (torch.zeros_like(bucket.weights) for _ in range(kept - 1))
        self._buffers = deque([bucket.weights, *others])
        """The newest first."""
        self.newest = 0
        """Updates that the newest version has seen."""
        self._bound: Tensor | None = None
        """The buffer that the parameters point at."""
        self._resting = [torch.zeros_like(grad) for grad in bucket.grads] if turns else None

    def begin(self, version: int) -> None:
        """Begin anew with the bucket's weights, which are of that version."""
        self.newest = version
        self._bound = None  # views that were made with the bucket share its version counter
        self.use(version)

    def advance(self) -> None:
        """Let the next update write a buffer of its own: that of the oldest version."""
        shard, bucket = self.shard, self.shard.bucket
        shard.await_weights()
        self._buffers.rotate(1)
        self.newest += 1
        bucket.weights = self._buffers[0]
        shard.point_at(bucket.weights)

    def use(self, version: int) -> None:
        """Point the parameters at a version."""
        age = self.newest - version
        assert 0 <= age < len(self._buffers), f"version {version}, the newest is {self.newest}"
        if age == 0:
            self.shard.await_weights()
        buffer = self._buffers[age]
        if buffer is self._bound:
            return
        self._bound = buffer
        for placed in self.shard.bucket.placed:
            # not in place: graphs in flight have seen the parameter
            placed.parameter.data = self.shard.bucket.view(buffer, placed.entry)

    def turn(self) -> None:
        """Let further gradients add up apart from those that have come, from zero."""
        bucket = self.shard.bucket
        assert self._resting is not None
        bucket.grads, self._resting = self._resting, bucket.grads
        for grad in bucket.grads:
            grad.zero_()
        for placed in bucket.placed:
            grad = bucket.view(bucket.grads[placed.use], placed.entry)
            cast(Any, placed.parameter).main_grad = grad

    @property
    def weights(self) -> list[Tensor]:
        """All versions that are kept, the newest first."""
        return list(self._buffers)
