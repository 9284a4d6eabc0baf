"""The grid of processes: arithmetic between ranks and coordinates, which needs no processes.

Processes form a grid pp x dp x cp x tp with tp innermost, so that tensor-parallel peers, which
talk most, sit next to each other, and pipeline neighbours, which talk least, sit furthest apart::

    rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index

Experts see the dp x cp x tp ranks of a pipeline index as edp x ep x etp: ep x etp neighbours share
them out, whichever of the three axes they are along.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

AxisName = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[AxisName, ...] = ("pp", "dp", "cp", "tp")


class MeshCoordinates(NamedTuple):
    """A process' index along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int

    @property
    def words(self) -> str:
        """pp 1, dp 0, cp 0, tp 1."""
        return ", ".join(f"{name} {index}" for name, index in self._asdict().items())


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes, and the arithmetic between ranks and coordinates."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    """Experts of a pipeline index are split over ep x etp ranks; these are no factors of the world.
    """
    ranks_per_node: int | None = None
    """Ranks of a node, where tokens get to experts within nodes and then between them."""

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
        """Ranks that differ from `rank` only along `axis`, in the order of that axis."""
        return list(self._along(self.coordinates_of(rank), axis))

    def replica_ranks(
        self, rank: int, pp_indices: Sequence[int], *, over_ep: bool = False
    ) -> list[int]:
        """Ranks with the tp index of `rank`, on the given pipeline indices, for all dp and cp:
        they compute with the same weights. With `over_ep` the ranks of any tp index that have the
        same of what is split over ep. Ascending."""
        block = self.dp * self.cp * self.tp
        stride = self.ep_ranks if over_ep else self.tp
        return [pp * block + i for pp in pp_indices for i in range(rank % stride, block, stride)]

    @property
    def ep_ranks(self) -> int:
        """Ranks of a pipeline index that have everything that is split over ep together."""
        return self.ep * self.etp

    def ep_peers(self, rank: int) -> list[int]:
        """Ranks over which this one's stages are split over ep."""
        first = rank - rank % self.ep_ranks
        return list(range(first, first + self.ep_ranks))

    def ep_hops(self, rank: int) -> tuple[list[int], list[int]]:
        """Return the :meth:`ep_peers` of this rank's node, and those with its place in each."""
        assert self.ranks_per_node is not None
        peers, inner = self.ep_peers(rank), rank % self.ranks_per_node
        first = (rank - inner) % self.ep_ranks
        return peers[first : first + self.ranks_per_node], peers[inner :: self.ranks_per_node]

    def num_replicas(self, *, over_ep: bool = False) -> int:
        """Copies on a pipeline index of a stage's weights, or of those that are split `over_ep`."""
        return self.dp * self.cp * self.tp // (self.ep_ranks if over_ep else self.tp)

    def replica_index(self, rank: int, *, over_ep: bool = False) -> int:
        """Number of a rank's copy among them: those of one context-parallel group are
        neighbours."""
        block = self.dp * self.cp * self.tp
        return rank % block // (self.ep_ranks if over_ep else self.tp)

    def _along(self, at: MeshCoordinates, axis: AxisName) -> range:
        """The line of ranks through `at` along `axis`: they are equally far apart."""
        stride = math.prod(self.size(inner) for inner in AXES[AXES.index(axis) + 1 :])
        first = self.rank_of(at) - stride * int(getattr(at, axis))
        return range(first, first + stride * self.size(axis), stride)
