"""Traffic that expert maps cause, in bytes: replicas in each step, and changes of owners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megapipe.experts.map import ExpertMap


class ExpertBytes(NamedTuple):
    """Sizes of one expert on a rank, in bytes."""

    weights: int
    gradients: int
    states: int
    """Bytes of the rank's shard of master weights and optimizer states."""


class RankTraffic(NamedTuple):
    """Bytes that a rank sends and receives."""

    out: int
    in_: int


def replica_traffic(of: ExpertMap, sizes: ExpertBytes) -> list[RankTraffic]:
    """Count each rank's bytes per step: weights from owners to replicas, gradients back."""
    pairs = [(of.owners[e], rank) for rank, own in enumerate(of.replicas) for e in own]
    back = ((rank, owner) for owner, rank in pairs)
    return [
        RankTraffic(a.out + b.out, a.in_ + b.in_)
        for a, b in zip(
            _sent(of.ranks, pairs, sizes.weights),
            _sent(of.ranks, back, sizes.gradients),
            strict=True,
        )
    ]


def migration(before: ExpertMap, after: ExpertMap, sizes: ExpertBytes) -> list[RankTraffic]:
    """Count each rank's bytes when experts move to new owners with their weights and states."""
    pairs = ((a, b) for a, b in zip(before.owners, after.owners, strict=True) if a != b)
    return _sent(before.ranks, pairs, sizes.weights + sizes.states)


def most(sent: Iterable[RankTraffic]) -> int:
    """Return the maximum over all ranks of the bytes sent and of the bytes received."""
    return max(max(each) for each in sent)


def _sent(ranks: int, pairs: Iterable[tuple[int, int]], size: int) -> list[RankTraffic]:
    """Count the bytes per rank if the first rank of each pair sends `size` bytes to the second."""
    out, in_ = [0] * ranks, [0] * ranks
    for source, goal in pairs:
        out[source] += size
        in_[goal] += size
    return list(map(RankTraffic, out, in_))
