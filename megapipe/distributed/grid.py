"""The grid of processes: arithmetic between ranks and coordinates, without processes.

Processes form a grid pp x dp x cp x tp. tp is innermost, so that tensor-parallel peers, which
communicate most, are adjacent, and pipeline neighbours, which communicate least, are far apart::

    rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index

For experts, the dp x cp x tp ranks of a pipeline index are divided as edp x ep x etp. Each set of
ep x etp consecutive ranks has all experts, split over its ranks. The set may lie along any of the
three axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

AxisName = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")


class MeshCoordinates(NamedTuple):
    """Index of a process along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int

    @property
    def words(self) -> str:
        """Coordinates as text: ``pp 1, dp 0, cp 0, tp 1``."""
        return ", ".join(f"{name} {index}" for name, index in self._asdict().items())


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes, and arithmetic between ranks and coordinates."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    """Number of ranks over which each expert is split (expert tensor parallelism)."""
    ranks_per_node: int | None = None
    """Number of ranks per node if tokens are dispatched hierarchically, else None."""

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def size(self, axis: AxisName) -> int:
        return int(getattr(self, axis))

    def rank_of(self, at: MeshCoordinates) -> int:
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def coordinates_of(self, rank: int) -> MeshCoordinates:
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return MeshCoordinates(pp, dp, cp, tp)

    def peers(self, rank: int, axis: AxisName) -> list[int]:
        """Return the ranks that differ from `rank` only along `axis`, in the order of the axis."""
        return list(self._along(self.coordinates_of(rank), axis))

    def replica_ranks(
        self, rank: int, pp_indices: Sequence[int], *, over_ep: bool = False
    ) -> list[int]:
        """Return the ranks with the same weights as `rank` on the pipeline ranks `pp_indices`,
        ascending: those with its tp index, and any dp and cp index. With `over_ep`, return the
        ranks with the same shard of the experts instead; their tp indices may differ."""
        block = self.dp * self.cp * self.tp
        stride = self.ep_ranks if over_ep else self.tp
        return [pp * block + i for pp in pp_indices for i in range(rank % stride, block, stride)]

    @property
    def ep_ranks(self) -> int:
        """Number of consecutive ranks over which all experts of a stage are split."""
        return self.ep * self.etp

    def ep_peers(self, rank: int) -> list[int]:
        """Return the ranks over which the experts of the stages of `rank` are split."""
        first = rank - rank % self.ep_ranks
        return list(range(first, first + self.ep_ranks))

    def ep_hops(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the two groups of hierarchical dispatch: the :meth:`ep_peers` on the node of
        `rank`, and the peers with the same local index, one on each node."""
        assert self.ranks_per_node is not None
        peers, inner = self.ep_peers(rank), rank % self.ranks_per_node
        first = (rank - inner) % self.ep_ranks
        return peers[first : first + self.ranks_per_node], peers[inner :: self.ranks_per_node]

    def num_replicas(self, *, over_ep: bool = False) -> int:
        """Return the number of replicas of a stage's dense weights; with `over_ep`, of experts."""
        return self.dp * self.cp * self.tp // (self.ep_ranks if over_ep else self.tp)

    def replica_index(self, rank: int, *, over_ep: bool = False) -> int:
        """Return the index of the replica of `rank`; cp peers have adjacent indices."""
        block = self.dp * self.cp * self.tp
        return rank % block // (self.ep_ranks if over_ep else self.tp)

    def _along(self, at: MeshCoordinates, axis: AxisName) -> range:
        """Return the ranks, evenly spaced, along `axis` through the coordinates `at`."""
        stride = math.prod(self.size(inner) for inner in AXES[AXES.index(axis) + 1 :])
        first = self.rank_of(at) - stride * int(getattr(at, axis))
        return range(first, first + stride * self.size(axis), stride)
