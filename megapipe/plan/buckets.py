"""The flat buffers of a process, counted before it exists: what is reduced, sharded and gathered.

A stage's parameters lie in one bucket, tied embeddings in one of their own; see
:mod:`megapipe.optim.buffers`, whose sizes these are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from megapipe.config import Config, OptimizerConfig
from megapipe.layout import Layout
from megapipe.plan.params import (
    DTYPE_BYTES,
    WORD_EMBEDDING,
    Shapes,
    is_split,
    known,
    local_shape,
    stage_shapes,
)

ALIGNMENT = 16
"""Ranges that an update touches begin at multiples of this many values. Vector instructions then
cut a parameter alike, and round alike, whatever slice of a bucket it is in."""


def aligned(length: int, parts: int = 1) -> int:
    """`length`, padded so that it has so many equal parts that are aligned."""
    multiple = ALIGNMENT * parts
    return -(-length // multiple) * multiple


def main_bytes(dtype: str) -> int:
    """Size of a main gradient, master weight or moment of a model in `dtype`."""
    return max(DTYPE_BYTES[dtype], 4)


@dataclass(frozen=True)
class Group:
    """Processes that share a bucket, or a slice of it."""

    axis: str
    """dp, or what part of it (dp:shard, dp:replicate), by pipeline indices if several: dp*pp[0,3];
    pp where it is that axis."""
    members: int


@dataclass(frozen=True)
class BucketPlan:
    """The part of one stage (or of the tied embedding) that a tensor-parallel rank holds."""

    stage: int
    """Its number; the tied bucket's is the number of stages."""
    shapes: Shapes
    """Local shapes."""
    shard: Group
    """Its members own equal slices."""
    replicate: Group
    """Its members own the same slice."""
    shared: bool
    """Of several stages or holders, so reduced once a step."""
    uses: int = 1
    """Gradients that a process accumulates apart: 2 where it uses a tied matrix twice."""

    @property
    def numel(self) -> int:
        """Length of the buffer, with what :func:`aligned` adds between its regions and slices."""
        sizes: dict[tuple[bool, bool], int] = defaultdict(int)
        for name, shape in self.shapes.items():
            decays = name.endswith(".weight") and len(shape) > 1
            sizes[decays, is_split(name)] += prod(shape)
        owners = self.shard.members * self.replicate.members
        return aligned(sum(map(aligned, sizes.values())), owners)

    @property
    def whole(self) -> int:
        """Parameters that every tp rank holds whole."""
        return sum(prod(shape) for name, shape in self.shapes.items() if not is_split(name))

    @property
    def norms(self) -> int:
        """Parameters of norms, whose gradients are computed within I."""
        return sum(prod(shape) for name, shape in self.shapes.items() if "norm." in name)


def zero_stage(optimizer: OptimizerConfig, dp: int) -> int:
    """The ZeRO stage in force: 1 at most where a group of one has nothing to share out."""
    return optimizer.zero if (optimizer.shard_size or dp) > 1 else min(optimizer.zero, 1)


def process_stages(config: Config, layout: Layout, rank: int) -> Sequence[int]:
    """Stages of the processes at pipeline index `rank`; all where one process runs them all."""
    if config.pipeline.channels == "in_process":
        return range(layout.stages)
    return layout.schedule.placement.stages_of(rank)


def process_buckets(config: Config, layout: Layout, rank: int) -> Iterator[BucketPlan]:
    """Buckets of a process at pipeline index `rank`, in order, the tied one last."""
    model, placement = config.model, layout.schedule.placement
    alone = config.pipeline.channels == "in_process"

    def bucket(stage: int, shapes: Shapes, ranks: Iterable[int], shared: bool) -> BucketPlan:
        holders = (0,) if alone else tuple(sorted(set(ranks)))
        local = {name: local_shape(name, shape, layout.tp) for name, shape in shapes.items()}
        return BucketPlan(stage, local, *_groups(config, layout, holders), shared)

    tied_uses = 0
    for stage in process_stages(config, layout, rank):
        spec, holders = layout.stage_layers[stage], placement.holders(stage)
        shapes = stage_shapes(model, spec)
        if model.tied_embeddings and WORD_EMBEDDING in shapes:
            del shapes[WORD_EMBEDDING]
            tied_uses += spec.embedding + spec.head
        if shapes:
            yield bucket(stage, shapes, holders, len(holders) > 1)
    if tied_uses:
        shapes = {WORD_EMBEDDING: (known(model.vocab_size), model.hidden)}
        ends = (*placement.holders(0), *placement.holders(layout.stages - 1))
        yield replace(bucket(layout.stages, shapes, ends, True), uses=tied_uses)


def _groups(config: Config, layout: Layout, holders: tuple[int, ...]) -> tuple[Group, Group]:
    """Who shards and who replicates a bucket of these pipeline indices; see optim.policy."""
    dp, own = layout.dp, holders[:1]

    def group(members: int, stride: int, pp_indices: tuple[int, ...]) -> Group:
        """`members` replicas, `stride` apart, at each of the pipeline indices."""
        parts = []
        if members > 1:
            parts.append("dp" if members == dp else "dp:shard" if stride == 1 else "dp:replicate")
        if len(pp_indices) > 1:
            whole = len(pp_indices) == layout.pp and not parts
            parts.append("pp" if whole else f"pp[{','.join(map(str, pp_indices))}]")
        return Group("*".join(parts) or "dp", members * len(pp_indices))

    zero, shard_size = zero_stage(config.optimizer, layout.dp), config.optimizer.shard_size
    if zero == 0:
        return group(1, 1, own), group(dp, 1, holders)
    if shard_size is None and zero < 3:
        return group(dp, 1, holders), group(1, 1, own)
    size = shard_size or dp
    return group(size, 1, own), group(dp // size, size, holders)
