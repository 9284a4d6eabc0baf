"""When the gradient buckets of a stage are sent off: each as soon as its gradients are complete."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from megapipe.layers.parameter import spec_of
from megapipe.optim.shard import Shard


class BucketLauncher:
    """The buckets of one stage, in the order in which a backward completes them.

    A backward goes through the matrices one by one. So a bucket is complete when the gradient of a
    matrix in a later bucket has come, and none of its own gradients waits to be computed. Gradients
    of other parameters may come at any time; their bucket leaves last, after it that over ep.
    """

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self._place: dict[str, int] = {}
        """Number of the bucket of each matrix, by name; a tied one is in no bucket of a stage."""
        self._left = 0
        """How many buckets have left in this run of weight gradients."""

    def add(self, shard: Shard) -> None:
        """Add the bucket that leaves after those added before."""
        for entry in shard.bucket.entries:
            if entry.spec.decay and entry.spec.split and not entry.spec.over_ep:
                self._place[entry.spec.name] = len(self.shards)
        self.shards.append(shard)

    def begin(self) -> None:
        """Begin a step: no bucket has left."""
        self._left = 0

    def gradient_ready(self, parameter: Parameter, waiting: Iterable[Parameter]) -> None:
        """Note that `parameter` has its gradient, while those of `waiting` are to come.

        In the last operation that adds gradients: sends off the buckets before all of theirs.
        """
        here = self._place.get(spec_of(parameter).name, 0)
        if here > self._left:
            names = (spec_of(each).name for each in waiting)
            self._send(min([here, *(self._place[name] for name in names if name in self._place)]))

    def launch_remaining(self) -> None:
        """Send off the buckets that have not left, but for those that leave once a step."""
        self._send(len(self.shards))
        self._left = 0

    def _send(self, stop: int) -> None:
        for shard in self.shards[self._left : stop]:
            if not shard.bucket.late:
                shard.start_reduce()
        self._left = max(self._left, stop)
