"""Bytes that maps take: of copies in each step, of owners when they change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megapipe.experts.map import ExpertMap


class ExpertBytes(NamedTuple):
    """Bytes of an expert on a rank."""

    weights: int
    gradients: int
    states: int
    """Masters and states, its own share."""


class RankTraffic(NamedTuple):
    """Bytes that a rank sends and receives."""

    out: int
    in_: int


def replica_traffic(of: ExpertMap, sizes: ExpertBytes) -> list[RankTraffic]:
    """Of each rank in a step: owners send weights to those with copies, who send gradients back."""
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
    """Of each rank, once: experts go to their new owners with all that belongs to them."""
    pairs = ((a, b) for a, b in zip(before.owners, after.owners, strict=True) if a != b)
    return _sent(before.ranks, pairs, sizes.weights + sizes.states)


def most(sent: Iterable[RankTraffic]) -> int:
    """Bytes of the rank by which an exchange is held up, where links take both ways at once."""
    return max(max(each) for each in sent)


def _sent(ranks: int, pairs: Iterable[tuple[int, int]], size: int) -> list[RankTraffic]:
    """From the first of each pair to the second, so many bytes."""
    out, in_ = [0] * ranks, [0] * ranks
    for source, goal in pairs:
        out[source] += size
        in_[goal] += size
    return list(map(RankTraffic, out, in_))
