"""Launch of a stage's gradient reductions, bucket by bucket, as soon as gradients are complete."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from megapipe.layers.parameter import spec_of
from megapipe.optim.shard import Shard


class BucketLauncher:
    """Launches a stage's bucket reductions, in the order in which a backward completes the buckets.

    A backward goes through the matrices one by one. So a bucket is complete when a matrix of a
    later bucket has its gradient, and no gradient of the bucket is deferred. Other parameters can
    get their gradients at any time, so their bucket is last but one, before that of experts.
    """

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self._bucket_of: dict[str, int] = {}
        """Bucket index of each matrix, by name. The tied embedding is in no bucket of a stage."""
        self._launched = 0
        """Number of buckets launched so far in the step's last operation that adds gradients."""

    def add(self, shard: Shard) -> None:
        """Append a bucket; buckets are launched in the order in which they are added."""
        for entry in shard.bucket.entries:
            if entry.spec.decay and entry.spec.split and not entry.spec.over_ep:
                self._bucket_of[entry.spec.name] = len(self.shards)
        self.shards.append(shard)

    def begin(self) -> None:
        """Begin a step, in which no bucket has been launched yet."""
        self._launched = 0

    def gradient_ready(self, parameter: Parameter, waiting: Iterable[Parameter]) -> None:
        """Launch the buckets that are complete, now that `parameter` has its gradient.

        `waiting`: parameters whose gradients are still deferred. Call this only in the step's last
        operation that adds gradients to the stage.
        """
        here = self._bucket_of.get(spec_of(parameter).name, 0)
        if here > self._launched:
            names = (spec_of(each).name for each in waiting)
            self._send(
                min([here, *(self._bucket_of[name] for name in names if name in self._bucket_of)])
            )

    def launch_remaining(self) -> None:
        """Launch the remaining buckets, except `late` ones, which are reduced at the step's end."""
        self._send(len(self.shards))
        self._launched = 0

    def _send(self, stop: int) -> None:
        for shard in self.shards[self._launched : stop]:
            if not shard.bucket.late:
                shard.start_reduce()
        self._launched = max(self._launched, stop)
