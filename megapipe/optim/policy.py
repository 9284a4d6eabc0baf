"""Which state of a model is sharded, over which processes (ZeRO, Rajbhandari et al., 1910.02054).

=====  =====================================  ================================================
stage  each process keeps a slice of          communicated per step, for each bucket
=====  =====================================  ================================================
0      nothing                                one all-reduce of gradients
1      optimizer state                        one reduce-scatter, one all-gather of weights
2      and gradients                          a reduce-scatter per run of weight gradients
3      and weights                            and an all-gather each time a stage is unsharded
=====  =====================================  ================================================

With `shard_size` the slices are over that many neighbours only and every such group has them all
(MiCS, Zhang et al., 2205.00119; hybrid sharding, Zhao et al., 2304.11277): gradients are
reduce-scattered within the group, then all-reduced between groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import Axis, ParallelMesh
from megapipe.layout.replicas import zero_stage
from megapipe.optim.link import Link

REDUCE_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}
"""Types in which gradients travel, by ``optimizer.reduce_dtype``; None: that of the main ones."""


class BucketAxes(NamedTuple):
    """The axes of a bucket: slices differ over `shard`, and are the same over `replicate`."""

    shard: Axis
    replicate: Axis

    @property
    def sharded(self) -> bool:
        """Whether there are several slices."""
        return self.shard.size > 1


@dataclass(frozen=True)
class ZeroPolicy:
    """One policy for all buckets of a process."""

    stage: int = 1
    """That of the buckets with most copies: experts may have more of them than other weights. A
    bucket without another copy has nothing to shard (:attr:`BucketAxes.sharded`)."""
    shard_size: int | None = None
    """Processes that share one copy of the state; None: all that have the same weights."""
    prefetch: int = 1
    """Stages whose weights are gathered before they are needed (stage 3)."""
    reduce_dtype: torch.dtype | None = None
    """Type in which gradients travel; None: that of the main gradients."""
    chunk_mib: float | None = None
    """Least size of the buckets in which a stage's gradients are reduced; None: in one."""

    @classmethod
    def of(cls, config: OptimizerConfig, copies: int) -> ZeroPolicy:
        """The policy where at most so many processes compute with the same weights."""
        return cls(
            zero_stage(config, copies),
            config.shard_size,
            config.prefetch,
            REDUCE_DTYPES[config.reduce_dtype],
            config.reduce_chunk_mib,
        )

    @property
    def shards_gradients(self) -> bool:
        return self.stage >= 2

    @property
    def shards_weights(self) -> bool:
        return self.stage == 3


class BucketGroups:
    """The process groups of a process' buckets, made once for each set of ranks."""

    def __init__(self, mesh: ParallelMesh, policy: ZeroPolicy) -> None:
        self.mesh = mesh
        self.policy = policy
        self._made: dict[tuple[int, ...], Axis] = {}
        if mesh.backend != "nccl":
            self._made[mesh.dp.ranks] = mesh.dp

    def axes_of(self, holders: Sequence[int], *, experts: bool = False) -> BucketAxes:
        """The axes of a bucket that the pipeline indices `holders` hold, on all dp and cp indices;
        one of `experts` on all tp indices too.

        All processes that share a bucket ask in the same order.
        """
        shard, replicate = self._members(sorted(set(holders)), experts)
        return BucketAxes(self._group(shard), self._group(replicate))

    def link(self, first: int, last: int) -> Link:
        """Between the ranks of two pipeline indices, of which those of the `first` one update; both
        have the same replica and tensor-parallel index."""
        grid, at = self.mesh.grid, self.mesh.at
        ranks = sorted(grid.rank_of(at._replace(pp=index)) for index in (first, last))
        gradients, weights = (self.mesh.group_of(ranks, ctas=1) for _ in range(2))
        link = Link(gradients, weights, updates=at.pp == first, early=self.mesh.backend != "nccl")
        link.connect(self.mesh.device)
        return link

    def _members(self, holders: Sequence[int], experts: bool) -> tuple[list[int], list[int]]:
        """Ranks among which slices differ, and ranks that have this one's slice."""
        grid, rank, policy = self.mesh.grid, self.mesh.rank, self.policy
        members = grid.holders(rank, holders, experts=experts)
        if policy.stage == 0:
            return [rank], members
        if policy.shard_size is None and not policy.shards_weights:
            return members, [rank]
        copies = grid.copies(experts=experts)
        size = min(policy.shard_size or copies, copies)
        stage, copy = grid.coordinates_of(rank).pp, grid.copy_of(rank, experts=experts)
        shard, replicate = [], []
        for member in members:
            its_stage = grid.coordinates_of(member).pp
            its_copy = grid.copy_of(member, experts=experts)
            if its_stage == stage and its_copy // size == copy // size:
                shard.append(member)
            if its_copy % size == copy % size:
                replicate.append(member)
        return shard, replicate

    def _group(self, ranks: list[int]) -> Axis:
        if len(ranks) == 1:
            return Axis.alone(self.mesh.rank)
        key = tuple(ranks)
        if key not in self._made:
            self._made[key] = self.mesh.connected(self.mesh.group_of(ranks))
        return self._made[key]
