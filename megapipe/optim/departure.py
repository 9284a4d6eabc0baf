"""When the buckets of a stage's gradients leave: each as soon as nothing is added to it."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Parameter

from megapipe.layers.parameter import spec_of
from megapipe.optim.shard import Shard


class Departure:
    """The buckets of one stage, in the order in which a backward completes them.

    A backward goes through the matrices one by one. So a bucket is complete when the gradient of a
    matrix of a later one has come in, and none of its own waits to be computed. What is no such
    matrix says nothing: it may come at any time, and leaves last.
    """

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self._place: dict[str, int] = {}
        """The bucket of each matrix that is cut by: all but a tied one, which is in none."""
        self._left = 0
        """How many have left in this run of weight gradients."""

    def add(self, shard: Shard) -> None:
        """The bucket that leaves after those there are."""
        for entry in shard.bucket.entries:
            if entry.spec.decay and entry.spec.split:
                self._place[entry.spec.name] = len(self.shards)
        self.shards.append(shard)

    def begin(self) -> None:
        """All are here."""
        self._left = 0

    def came(self, parameter: Parameter, waiting: Iterable[Parameter]) -> None:
        """In the last operation that adds gradients: send off what precedes all of these."""
        here = self._place.get(spec_of(parameter).name, 0)
        if here > self._left:
            names = (spec_of(each).name for each in waiting)
            self._send(min([here, *(self._place[name] for name in names if name in self._place)]))

    def rest(self) -> None:
        """Send off those that are still here."""
        self._send(len(self.shards))
        self._left = 0

    def _send(self, stop: int) -> None:
        for shard in self.shards[self._left : stop]:
            shard.start_reduce()
        self._left = max(self._left, stop)
