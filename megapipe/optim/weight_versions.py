"""Versions of a bucket's weights, which the operations of a no-flush pipeline read.

A version is a flat buffer. An update overwrites the oldest one, which no operation reads any more.
Buffers never move: operations in flight read them. If an operation reads another version than the
previous operation, the parameters are pointed to that version.
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
"""Function (shard, updates ahead, updates so far, out [stop - start]) that writes predicted weights
or, for a negative number of updates ahead, estimates of older weights."""
NOT_AHEAD = Fraction(0)


class WeightVersions:
    """The newest `kept` versions of the weights in a shard's bucket.

    With `turns`, update windows use two gradient accumulators in turn: the gradients of one update
    window wait for their update while those of the next one are accumulated. `predict` writes this
    rank's shard of predicted weights; `predicted` is the number of buffers for predicted weights.
    """

    def __init__(
        self, shard: Shard, kept: int, *, turns: bool, predicted: int, predict: Predict
    ) -> None:
        self.shard = shard
        self._predict = predict
        self._free = [torch.zeros_like(shard.bucket.weights) for _ in range(predicted)]
        self._predicted: dict[tuple[int, Fraction], Tensor] = {}
        """Predicted weights by version and number of updates ahead, the most recently used last."""
        bucket = shard.bucket
        # the same memory, without the version counter that the parameters share with the buffer
        # they were made in: work in flight has seen them, and may see other memory written
        bucket.weights = bucket.weights.data
        shard.write_weights_into(bucket.weights)
        others = (torch.zeros_like(bucket.weights) for _ in range(kept - 1))
        self._buffers = deque([bucket.weights, *others])
        """Buffers of the versions, the newest first."""
        self.newest = self.oldest = 0
        """Number of the newest version; `oldest` is the number of the oldest available one."""
        self._bound: Tensor | None = None
        """Buffer that the parameters point to."""
        self._views: dict[int, list[Tensor]] = {}
        """Views of all parameters in a buffer, by the buffer's address."""
        self._resting = [torch.zeros_like(grad) for grad in bucket.grads] if turns else None

    def begin(self, version: int, older: int = 0) -> None:
        """Restart with the bucket's weights as version `version`. The caller has already filled the
        buffers of the `older` versions before it in :attr:`weights`."""
        self.newest, self.oldest = version, version - older
        self._free += self._predicted.values()
        self._predicted.clear()
        self._set_older()
        self.use(version)

    def advance(self) -> None:
        """Make the next update write into the oldest version's buffer."""
        shard, bucket = self.shard, self.shard.bucket
        shard.await_weights()
        self._buffers.rotate(1)
        self.newest += 1
        bucket.weights = self._buffers[0]
        shard.write_weights_into(bucket.weights)
        self._set_older()

    def _set_older(self) -> None:
        """Pass the buffers of older versions to the shard."""
        known = self.newest - self.oldest
        self.shard.older = list(self._buffers)[1 : 1 + known]

    def use(self, version: int, ahead: Fraction = NOT_AHEAD) -> None:
        """Point the parameters to the weights `ahead` updates after `version`. If that version is
        overwritten, the oldest available one is used, and predicted fewer updates ahead."""
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
        """Return the weights `ahead` updates after `version`, predicted at their first use."""
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
        """Accumulate later gradients in the other accumulator, from zero."""
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
        """Buffers of main gradients."""
        return [*self.shard.bucket.grads, *(self._resting or ())]

    @property
    def predictions(self) -> list[Tensor]:
        """Buffers of predicted weights."""
        return [*self._free, *self._predicted.values()]

    @property
    def weights(self) -> list[Tensor]:
        """Buffers of all versions, the newest first."""
        return list(self._buffers)
