"""Plans the buckets of a process: parameters that are reduced, sharded and gathered together.

ZeRO (Rajbhandari et al., 1910.02054) shards a bucket over its processes:

  =====  =====================================  ================================================
  stage  each process keeps a shard of          communicated per step, for each bucket
  =====  =====================================  ================================================
  0      nothing                                one all-reduce of gradients
  1      optimizer state                        one reduce-scatter, one all-gather of weights
  2      optimizer state, gradients             as 1, with a reduce-scatter after each series of
                                                a stage's weight gradients
  3      optimizer state, gradients, weights    as 2, with an all-gather each time that a stage
                                                is unsharded
  =====  =====================================  ================================================

With `shard_group_size` a bucket is sharded over groups of that many consecutive replicas; each
group has all shards (MiCS, Zhang et al., 2205.00119; hybrid sharding, Zhao et al., 2304.11277).
Gradients are reduce-scattered within the group, then all-reduced between groups.

:mod:`megapipe.optim.buffers` makes a run's buckets from :class:`BucketPlan`. Plans of memory,
traffic and time use it too.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megapipe.config.config import Config
from megapipe.layers.specs import ParameterSpec, by_name
from megapipe.layout.layout import Layout
from megapipe.util.dtypes import main_bytes

ALIGNMENT = 16
"""Alignment in values: every range that an update touches begins at a multiple of this number. So
vector instructions round a parameter equally in every sharding of its bucket."""


def aligned(length: int, parts: int = 1) -> int:
    """Pad `length` so that each of `parts` equal shards is a multiple of :data:`ALIGNMENT`."""
    multiple = ALIGNMENT * parts
    return -(-length // multiple) * multiple


KINDS = ((False, False), (True, False), (False, True), (True, True))
"""Kinds of parameters, (split over ep, frozen). A stage has separate buckets for each kind."""


class Sized(NamedTuple):
    """Name and local size of a parameter in one process."""

    name: str
    numel: int
    decays: bool
    split: bool
    """Whether the parameter is split over tp; otherwise every tp rank holds all of it."""


class BucketCut(NamedTuple):
    """Names of a stage's parameters that share a bucket, and the bucket's place in the buffer."""

    names: frozenset[str]
    start: int
    """Offset of the bucket in the stage's buffer, in values."""


def cut(parameters: Iterable[Sized], least: int | None) -> list[BucketCut]:
    """Cut a stage's parameters, in forward order, into buckets of at least `least` values.

    Buckets come in the order in which a backward completes them: first matrices that are split over
    tp, from the last layer to the first, then all others. The last bucket of matrices may be
    smaller. There is one bucket if `least` is None or there are too few values to cut.
    """
    listed = list(parameters)
    matrices = [each for each in listed if each.decays and each.split]
    start = total = sum(each.numel for each in matrices)
    stop, names = total, list[str]()
    cuts = []
    for each in reversed(matrices):
        start -= each.numel
        names.append(each.name)
        full = least is not None and stop - start >= least
        if start == 0 or (full and start % ALIGNMENT == 0):
            cuts.append(BucketCut(frozenset(names), start))
            stop, names = start, []
    if len(cuts) < 2:
        return [BucketCut(frozenset(each.name for each in listed), 0)]
    rest = frozenset(each.name for each in listed if not (each.decays and each.split))
    return [*cuts, BucketCut(rest, aligned(total))] if rest else cuts


def chunk_length(chunk_mib: float | None, size: int) -> int | None:
    """Convert ``optimizer.bucket_mib``, a size in MiB, to a number of gradients of `size` bytes
    each; None stays None."""
    return None if chunk_mib is None else max(1, int(chunk_mib * 2**20) // size)


@dataclass(frozen=True)
class BucketGroup:
    """Processes that share a bucket or a shard of it: data-parallel replicas at one or more
    pipeline indices."""

    axis: str
    """Name of the group, for plans and logs. It begins with dp, or dp*cp with context parallelism;
    for parameters split over ep with edp, but with dp if ep x etp = tp. ``:shard`` or
    ``:replicate`` marks a group of some of the replicas, ``*pp[0,3]`` a group with several pipeline
    indices. ``pp`` alone is all pipeline indices of one replica."""
    copies: int
    stride: int
    """Distance between neighbouring replicas, in data-parallel indices."""
    holders: tuple[int, ...]
    """Pipeline indices of the group, ascending."""
    over_ep: bool
    """Whether the replicas are those of expert data parallelism (edp), not of dp."""

    @property
    def members(self) -> int:
        """Number of processes in the group."""
        return self.copies * len(self.holders)


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of a stage (or of the tied embedding) that a rank holds."""

    stage: int
    """Number of the stage; for the tied embedding's bucket, the number of stages."""
    parameters: tuple[ParameterSpec, ...]
    """Parameters of the bucket; a tied one that a process uses twice is listed once."""
    start: int
    """Offset of the bucket in the stage's buffer, in values."""
    tp: int
    ep: int
    etp: int
    shard: BucketGroup
    """Processes that own different shards, of equal length."""
    replicate: BucketGroup
    """Processes that own the same shard."""
    zero: int
    """ZeRO stage in force for the run (:mod:`megapipe.layout.zero_stage`)."""
    shared: bool
    """Whether several stages or pipeline ranks share the bucket; it is then reduced once a step."""
    holders: int = 1
    """Number of pipeline ranks in this process that share the bucket."""
    uses: int = 1
    """Number of gradient buffers that the bucket has: 2 if the process uses a tied matrix twice."""
    link: tuple[int, int] | None = None
    """Pipeline indices of the two stages with a tied embedding, if each has a bucket for it. The
    first stage updates the bucket; messages replace reductions and all-gathers over both
    (:mod:`megapipe.optim.tied_embedding`)."""
    slots: int = 0
    """Number of slots per MoE layer for replicas of other ranks' experts; the gradients of these
    replicas are sent to the owners at the end of a step."""
    updates: bool = True
    """Whether the process updates the bucket; otherwise it holds only weights and gradients."""

    @property
    def numel(self) -> int:
        """Number of values in the buffer, with the padding by :func:`aligned`."""
        sizes: dict[tuple[bool, bool], int] = defaultdict(int)
        for each in _sized(self.parameters, self.tp, self.ep, self.etp):
            sizes[each.decays, each.split] += each.numel
        owners = self.shard.members * self.replicate.members
        return aligned(sum(map(aligned, sizes.values())), owners)

    @property
    def over_ep(self) -> bool:
        """Whether the bucket's parameters are split over ep."""
        return self.parameters[0].over_ep

    @property
    def frozen(self) -> bool:
        """Whether the bucket's parameters are not trained: no gradients, no optimizer states."""
        return self.parameters[0].frozen

    @property
    def reduced_per_run(self) -> bool:
        """Whether ZeRO-2 or 3 is in force for the bucket's gradients, even if the shard group has
        only one process."""
        return self.zero >= 2 and not (self.shared or self.slots or self.frozen)

    @property
    def sharded_grads(self) -> bool:
        """Whether gradients are reduced and freed after each series of a stage's weight gradients;
        otherwise they are reduced once a step."""
        return self.reduced_per_run and not self.is_unsharded

    @property
    def sharded_weights(self) -> bool:
        """Whether the weights are allocated only while a stage computes with them."""
        return self.zero == 3 and not self.is_unsharded

    @property
    def late(self) -> bool:
        """Whether gradients are reduced only at the end of a step, even if complete before."""
        return self.slots > 0 or (self.reduced_per_run and self.is_unsharded)

    @property
    def replica_numel(self) -> int:
        """Number of values of the expert replicas on one rank if all its slots are used."""
        if not self.slots:
            return 0
        indices = {spec.name: spec.shape[0] // self.ep for spec in self.parameters}
        return sum(self._values([p]) // indices[p.name] for p in self.parameters) * self.slots

    @property
    def is_unsharded(self) -> bool:
        """Whether the shard group has one process, which owns the whole bucket."""
        return self.shard.members == 1

    @property
    def head_partial_numel(self) -> int:
        """Number of values whose gradient on a tp rank is a partial sum: only over the attention
        heads of this rank."""
        of_heads = self._values(spec for spec in self.parameters if spec.heads_partial)
        return of_heads if self.tp > 1 else 0

    @property
    def replicated_numel(self) -> int:
        """Number of values of parameters that every tp rank holds in full."""
        return self._values(spec for spec in self.parameters if not (spec.split or spec.over_ep))

    @property
    def matmul_numel(self) -> int:
        """Number of values of linear weights, whose gradients are matrix products."""
        return self._values(spec for spec in self.parameters if spec.is_matmul)

    @property
    def norm_numel(self) -> int:
        """Number of values whose gradients autograd computes within I, not W: those of norms."""
        return self._values(spec for spec in self.parameters if spec.grad_by_autograd)

    def _values(self, parameters: Iterable[ParameterSpec]) -> int:
        """Count the values of `parameters` on one rank."""
        return sum(spec.local_numel(self.tp, self.ep, self.etp) for spec in parameters)


def _sized(parameters: Iterable[ParameterSpec], tp: int, ep: int, etp: int) -> Iterator[Sized]:
    for spec in parameters:
        yield Sized(spec.name, spec.local_numel(tp, ep, etp), spec.decay, spec.split)


def process_buckets(config: Config, layout: Layout, rank: int) -> Iterator[BucketPlan]:
    """Yield the buckets of a process at pipeline index `rank`, stage by stage. Within a stage the
    buckets of dense parameters come first, in the order in which they are reduced; then come
    buckets of parameters split over ep, and frozen ones. The tied embedding's bucket comes last."""
    placement, zero = layout.schedule.placement, layout.replicas.zero
    least = chunk_length(config.optimizer.bucket_mib, main_bytes(layout.model.dtype))
    sizes = layout.tp, *layout.ep_sizes

    def buckets(
        stage: int, parameters: Iterable[ParameterSpec], ranks: Iterable[int], *, shared: bool
    ) -> Iterator[BucketPlan]:
        """Yield the buckets of `parameters`, which the pipeline ranks `ranks` share."""
        own, holders, start = by_name(parameters).values(), sorted(set(ranks)), 0
        for over_ep, frozen in KINDS:
            some = [spec for spec in own if (spec.over_ep, spec.frozen) == (over_ep, frozen)]
            if not some:
                continue
            groups = _groups(config, layout, rank, holders, over_ep=over_ep)
            whole = shared or frozen or over_ep or all(group.members == 1 for group in groups)
            for piece in cut(_sized(some, *sizes), None if whole else least):
                yield BucketPlan(
                    stage,
                    tuple(spec for spec in some if spec.name in piece.names),
                    start + piece.start,
                    *sizes,
                    *groups,
                    zero,
                    shared,
                    holders=len(holders) if layout.in_process else 1,
                    slots=config.experts.replica_slots if over_ep else 0,
                )
            start += sum(aligned(each.numel) for each in _sized(some, *sizes))

    tied: list[ParameterSpec] = []
    for stage in layout.process_stages(rank):
        parameters = list(layout.model.parameters(layout.stage_layers[stage]))
        tied += (spec for spec in parameters if spec.tied)
        own = [spec for spec in parameters if not spec.tied]
        holders = placement.holders(stage)
        yield from buckets(stage, own, holders, shared=len(holders) > 1)
    first, last = placement.holders(0), placement.holders(layout.stages - 1)
    linked, uses = layout.tied_embedding_is_linked, len({spec.use for spec in tied})
    link, updates = (first[0], last[0]) if linked else None, not linked or rank in first
    ends = [rank] if linked else [*first, *last]
    for bucket in buckets(layout.stages, tied, ends, shared=True):
        yield replace(bucket, uses=uses, link=link, updates=updates)


def _groups(
    config: Config, layout: Layout, rank: int, holders: Sequence[int], *, over_ep: bool
) -> tuple[BucketGroup, BucketGroup]:
    """Return the shard and the replicate group of `rank` for a bucket that `holders` share."""
    copies = layout.edp if over_ep else layout.dp_cp
    own, every = ((0,), (0,)) if layout.in_process else ((rank,), tuple(holders))
    name = "dp" if layout.cp == 1 else "dp*cp"
    if over_ep and layout.ep_ranks != layout.tp:
        name = "edp"

    def group(members: int, stride: int, pp_indices: tuple[int, ...]) -> BucketGroup:
        """Make a group of `members` replicas, `stride` apart, at each of `pp_indices`."""
        parts = []
        if members > 1:
            part = "" if members == copies else ":shard" if stride == 1 else ":replicate"
            parts.append(f"{name}{part}")
        if len(pp_indices) > 1:
            whole = len(pp_indices) == layout.pp and not parts
            parts.append("pp" if whole else f"pp[{','.join(map(str, pp_indices))}]")
        return BucketGroup("*".join(parts) or name, members, stride, pp_indices, over_ep)

    zero, shard_size = layout.replicas.zero, config.optimizer.shard_group_size
    if zero == 0:
        return group(1, 1, own), group(copies, 1, every)
    if shard_size is None and zero < 3:
        return group(copies, 1, every), group(1, 1, own)
    size = min(shard_size or copies, copies)
    return group(size, 1, own), group(copies // size, size, every)
