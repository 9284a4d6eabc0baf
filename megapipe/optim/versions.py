"""Versions of the weights of a bucket, which the operations of a pipeline without a flush read.

A version is a flat buffer. An update writes the oldest one, which nobody reads any more, and no
buffer is ever moved: what is in flight points into it. Where an operation reads another version
than the one before it, the parameters are pointed at that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor

from megapipe.distributed.collectives import start_all_gather
from megapipe.optim.shard import Shard

Predict = Callable[[Shard, Fraction, int, Tensor], None]
"""(shard, updates ahead, updates so far, out [stop - start]): writes predicted weights, or where
the updates ahead are below 0 weights that are moved back."""
NOT_AHEAD = Fraction(0)


class WeightVersions:
    """The newest `kept` versions of a shard's bucket.

    `turns`: gradients of one window wait for their update while those of the next come in, so there
    are two accumulators. `predict` writes the shard's slice of predicted weights, of which as many
    as `predicted` are kept.
    """

    def __init__(
        self, shard: Shard, kept: int, *, turns: bool, predicted: int, predict: Predict
    ) -> None:
        self.shard = shard
        self._predict = predict
        self._free = [torch.zeros_like(shard.bucket.weights) for _ in range(predicted)]
        self._predicted: dict[tuple[int, Fraction], Tensor] = {}
        """By version and how far ahead, those that were used last at the end."""
        bucket = shard.bucket
        # the same memory, without the version counter that the parameters share with the buffer
        # they were made in: what is in flight has seen them, and may see other memory written
        bucket.weights = bucket.weights.data
        shard.write_weights_into(bucket.weights)
        others = (torch.zeros_like(bucket.weights) for _ in range(kept - 1))
        self._buffers = deque([bucket.weights, *others])
        """The newest first."""
        self.newest = self.oldest = 0
        """Updates that the newest version has seen, and the first one that there is."""
        self._bound: Tensor | None = None
        """The buffer that the parameters point at."""
        self._views: dict[int, list[Tensor]] = {}
        """By address of a buffer, the weights of all parameters in it."""
        self._resting = [torch.zeros_like(grad) for grad in bucket.grads] if turns else None

    def begin(self, version: int, older: int = 0) -> None:
        """Begin anew with the bucket's weights, which are of that version, and with `older` ones
        (:attr:`weights`)."""
        self.newest, self.oldest = version, version - older
        self._free += self._predicted.values()
        self._predicted.clear()
        self._tell()
        self.use(version)

    def advance(self) -> None:
        """Let the next update write a buffer of its own: that of the oldest version."""
        shard, bucket = self.shard, self.shard.bucket
        shard.await_weights()
        self._buffers.rotate(1)
        self.newest += 1
        bucket.weights = self._buffers[0]
        shard.write_weights_into(bucket.weights)
        self._tell()

    def _tell(self) -> None:
        """Let the shard know its older versions."""
        known = self.newest - self.oldest
        self.shard.older = list(self._buffers)[1 : 1 + known]

    def use(self, version: int, ahead: Fraction = NOT_AHEAD) -> None:
        """Point the parameters at a version, or at the first one there is, predicted `ahead`: a
        later one needs to be predicted by so much less."""
        if ahead > 0:
            ahead -= max(0, self.oldest - version)
        version = max(version, self.oldest)
        self._point_at(self._prediction(version, ahead) if ahead else self._version(version))

    def _version(self, version: int) -> Tensor:
        age = self.newest - version
        assert 0 <= age < len(self._buffers), f"version {version}, the newest is {self.newest}"
        if age == 0:
            self.shard.await_weights()
        return self._buffers[age]

    def _prediction(self, version: int, ahead: Fraction) -> Tensor:
        """The weights so many updates ahead, predicted when they are first used."""
        buffer = self._predicted.pop((version, ahead), None)
        if buffer is None:
            assert version == self.newest, f"version {version}, the newest is {self.newest}"
            buffer = (
                self._free.pop() if self._free else self._predicted.pop(next(iter(self._predicted)))
            )
            piece = buffer[self.shard.start : self.shard.stop]
            self._predict(self.shard, ahead, version, piece)
            start_all_gather(buffer, piece, self.shard.bucket.shard)()
        self._predicted[version, ahead] = buffer
        return buffer

    def _point_at(self, buffer: Tensor) -> None:
        if buffer is self._bound:
            return
        self._bound, bucket = buffer, self.shard.bucket
        views = self._views.get(buffer.data_ptr())
        if views is None:
            views = [bucket.view(buffer, placed.entry) for placed in bucket.placed]
            self._views[buffer.data_ptr()] = views
        for placed, view in zip(bucket.placed, views, strict=True):
            # not in place: graphs in flight have seen the parameter
            placed.parameter.data = view

    def switch_accumulator(self) -> None:
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
    def accumulators(self) -> list[Tensor]:
        """The buffers of main gradients."""
        return [*self.shard.bucket.grads, *(self._resting or ())]

    @property
    def predictions(self) -> list[Tensor]:
        """The buffers of predicted weights."""
        return [*self._free, *self._predicted.values()]

    @property
    def weights(self) -> list[Tensor]:
        """The buffers of all versions, the newest first."""
        return list(self._buffers)
