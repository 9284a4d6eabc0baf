"""Process groups of buckets (:class:`megapipe.layout.buckets.BucketGroup`)."""

from __future__ import annotations

from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.layout.buckets import BucketGroup
from megapipe.optim.tied_embedding import TiedEmbeddingLink


class BucketGroups:
    """The process groups of this process's buckets, made once for each set of ranks."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self._made: dict[tuple[int, ...], Axis] = {}
        if mesh.backend != "nccl":
            self._made[mesh.dp.ranks] = mesh.dp

    def axis(self, group: BucketGroup) -> Axis:
        """Return the axis of this process in `group`; the first call makes it.

        All processes that share a bucket make their calls in the same order.
        """
        ranks = self._ranks(group)
        if len(ranks) == 1:
            return Axis.alone(self.mesh.rank)
        if ranks not in self._made:
            self._made[ranks] = self.mesh.connected(self.mesh.group_of(ranks))
        return self._made[ranks]

    def link(self, first: int, last: int) -> TiedEmbeddingLink:
        """Make the link of a tied embedding between the pipeline ranks `first` and `last`. This
        process is one of them; the other has equal coordinates on all other axes. The rank `first`
        updates the embedding."""
        grid, at = self.mesh.grid, self.mesh.at
        ranks = sorted(grid.rank_of(at._replace(pp=index)) for index in (first, last))
        gradients, weights = (self.mesh.group_of(ranks, ctas=1) for _ in range(2))
        link = TiedEmbeddingLink(
            gradients, weights, updates=at.pp == first, early=self.mesh.backend != "nccl"
        )
        link.connect(self.mesh.device)
        return link

    def _ranks(self, group: BucketGroup) -> tuple[int, ...]:
        """Return the ranks of a group, ascending."""
        grid, rank, over_ep = self.mesh.grid, self.mesh.rank, group.over_ep
        own = grid.replica_index(rank, over_ep=over_ep)
        first = own - own // group.stride % group.copies * group.stride
        copies = range(first, first + group.copies * group.stride, group.stride)
        holders = grid.replica_ranks(rank, group.holders, over_ep=over_ep)
        return tuple(
            each for each in holders if grid.replica_index(each, over_ep=over_ep) in copies
        )
