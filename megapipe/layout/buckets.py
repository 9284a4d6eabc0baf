"""Buckets of a process: parameters that are reduced, sharded and gathered together.

ZeRO (Rajbhandari et al., 1910.02054) says what is sharded over the processes of a bucket:

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

:mod:`megapipe.optim.buffers` makes the buckets of a run from these plans; memory, traffic and time
of a run are counted by them.
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
"""Ranges that an update touches begin at multiples of this many values, so that vector instructions
cut and round a parameter in the same way whatever slice of a bucket it is in."""


def aligned(length: int, parts: int = 1) -> int:
    """`length` padded so that each of `parts` equal slices is a multiple of :data:`ALIGNMENT`."""
    multiple = ALIGNMENT * parts
    return -(-length // multiple) * multiple


KINDS = ((False, False), (True, False), (False, True), (True, True))
"""Parameters of a stage that are in buckets of their own: split over ep or not, frozen or not."""


class Sized(NamedTuple):
    """A parameter as a process holds it."""

    name: str
    numel: int
    decays: bool
    split: bool
    """Split over tp; otherwise every tp rank holds the same values."""


class BucketCut(NamedTuple):
    """Parameters of a stage that are reduced together."""

    names: frozenset[str]
    start: int
    """Where they would begin in one buffer of the whole stage."""


def cut(parameters: Iterable[Sized], least: int | None) -> list[BucketCut]:
    """Cut a stage's parameters, in forward order, into buckets of at least `least` values.

    Buckets come in the order in which a backward completes them: matrices that are split over tp,
    the last layers first, then everything else. The bucket of the first matrices may be smaller.
    There is one bucket if there is too little to cut, or `least` is None.
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
    """``optimizer.reduce_chunk_mib`` as a number of gradients of `size` bytes; None stays None."""
    return None if chunk_mib is None else max(1, int(chunk_mib * 2**20) // size)


@dataclass(frozen=True)
class BucketGroup:
    """Processes that share a bucket, or a slice of it: some copies of its parameters, at each of
    some pipeline indices."""

    axis: str
    """dp or a part of it (dp:shard, dp:replicate), times the pipeline indices if there are several,
    as in dp*pp[0,3]; pp for all of them without dp. dp*cp in the place of dp where positions are
    split, and edp where what is split over ep has more copies than other weights."""
    copies: int
    stride: int
    """From one copy to the next."""
    holders: tuple[int, ...]
    """Pipeline indices, ascending."""
    over_ep: bool
    """The copies are of what is split over ep, not of other weights."""

    @property
    def members(self) -> int:
        """Number of processes."""
        return self.copies * len(self.holders)


@dataclass(frozen=True)
class BucketPlan:
    """One bucket of a stage (or that of the tied embedding) that a rank holds."""

    stage: int
    """Number of the stage; for the tied bucket the number of stages."""
    parameters: tuple[ParameterSpec, ...]
    """Each once, also a tied one that a process uses twice."""
    start: int
    """Where it would begin in one buffer of the whole stage."""
    tp: int
    ep: int
    etp: int
    shard: BucketGroup
    """Processes that own different slices of equal length."""
    replicate: BucketGroup
    """Processes that own the same slice."""
    zero: int
    """ZeRO stage of the process: the one of the buckets with most copies."""
    shared: bool
    """Several stages or holders share the bucket, so it is reduced once a step."""
    holders: int = 1
    """Pipeline ranks of this process that share it."""
    uses: int = 1
    """Gradient buffers of the bucket: 2 where the process uses a tied matrix twice."""
    link: tuple[int, int] | None = None
    """Pipeline indices of two stages that have a bucket each of the same parameters. The first one
    updates them; messages take the place of sums and gathers over both
    (:mod:`megapipe.optim.link`)."""
    slots: int = 0
    """Most replicas, of indices over ep of other ranks, that a process has in each layer; their
    gradients are sent at the end of a step."""
    updates: bool = True
    """The process updates it; otherwise it has a copy, and no optimizer state."""

    @property
    def numel(self) -> int:
        """Values in the buffer, padded by :func:`aligned` between its segments and slices."""
        sizes: dict[tuple[bool, bool], int] = defaultdict(int)
        for each in _sized(self.parameters, self.tp, self.ep, self.etp):
            sizes[each.decays, each.split] += each.numel
        owners = self.shard.members * self.replicate.members
        return aligned(sum(map(aligned, sizes.values())), owners)

    @property
    def over_ep(self) -> bool:
        """Whether its parameters are split over ep."""
        return self.parameters[0].over_ep

    @property
    def frozen(self) -> bool:
        """Whether its parameters are not trained, so that it has no gradients and no states."""
        return self.parameters[0].frozen

    @property
    def reduced_per_run(self) -> bool:
        """Whether ZeRO-2 and 3 reduce it, if it has several slices, after each run of a stage's
        weight gradients."""
        return self.zero >= 2 and not (self.shared or self.slots or self.frozen)

    @property
    def sharded_grads(self) -> bool:
        """Whether its gradients are reduced after each run of a stage's weight gradients, and have
        memory until then; otherwise they are reduced once a step."""
        return self.reduced_per_run and not self.is_unsharded

    @property
    def sharded_weights(self) -> bool:
        """Whether its weights have memory only while a stage computes with them."""
        return self.zero == 3 and not self.is_unsharded

    @property
    def late(self) -> bool:
        """Whether its gradients are reduced at the end of a step, whenever they are complete."""
        return self.slots > 0 or (self.reduced_per_run and self.is_unsharded)

    @property
    def replica_numel(self) -> int:
        """Values of replicas on one rank, in all their slots."""
        if not self.slots:
            return 0
        indices = {spec.name: spec.shape[0] // self.ep for spec in self.parameters}
        return sum(self._values([p]) // indices[p.name] for p in self.parameters) * self.slots

    @property
    def is_unsharded(self) -> bool:
        """Whether no other process has another slice of it."""
        return self.shard.members == 1

    @property
    def head_partial_numel(self) -> int:
        """Values whose gradients each tp rank has of its heads alone."""
        of_heads = self._values(spec for spec in self.parameters if spec.heads_partial)
        return of_heads if self.tp > 1 else 0

    @property
    def replicated_numel(self) -> int:
        """Values of parameters that every tp rank holds whole, with shards of its own."""
        return self._values(spec for spec in self.parameters if not (spec.split or spec.over_ep))

    @property
    def matmul_numel(self) -> int:
        """Values of parameters whose gradients are matrix products; an embedding's are not."""
        return self._values(spec for spec in self.parameters if spec.is_matmul)

    @property
    def norm_numel(self) -> int:
        """Values of parameters whose gradients autograd computes within I."""
        return self._values(spec for spec in self.parameters if spec.grad_by_autograd)

    def _values(self, parameters: Iterable[ParameterSpec]) -> int:
        """Count the values of these parameters on one rank."""
        return sum(spec.local_numel(self.tp, self.ep, self.etp) for spec in parameters)


def _sized(parameters: Iterable[ParameterSpec], tp: int, ep: int, etp: int) -> Iterator[Sized]:
    for spec in parameters:
        yield Sized(spec.name, spec.local_numel(tp, ep, etp), spec.decay, spec.split)


def process_buckets(config: Config, layout: Layout, rank: int) -> Iterator[BucketPlan]:
    """Buckets of a process at pipeline index `rank`, in the order of stages and, within a stage, of
    reduction, then that of what is split over ep and those of what is frozen; the tied one comes
    last."""
    placement, zero = layout.schedule.placement, layout.replicas.zero
    least = chunk_length(config.optimizer.reduce_chunk_mib, main_bytes(layout.model.dtype))
    sizes = layout.tp, *layout.ep_sizes

    def buckets(
        stage: int, parameters: Iterable[ParameterSpec], ranks: Iterable[int], *, shared: bool
    ) -> Iterator[BucketPlan]:
        """Buckets of some `parameters` that pipeline `ranks` hold."""
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
                    slots=config.experts.slots if over_ep else 0,
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
    """Find who shards and who replicates a bucket of pipeline indices `holders`, for `rank`."""
    copies = layout.edp if over_ep else layout.dp_cp
    own, every = ((0,), (0,)) if layout.in_process else ((rank,), tuple(holders))
    name = "dp" if layout.cp == 1 else "dp*cp"
    if over_ep and layout.ep_ranks != layout.tp:
        name = "edp"

    def group(members: int, stride: int, pp_indices: tuple[int, ...]) -> BucketGroup:
        """`members` copies, `stride` apart, at each of the pipeline indices."""
        parts = []
        if members > 1:
            part = "" if members == copies else ":shard" if stride == 1 else ":replicate"
            parts.append(f"{name}{part}")
        if len(pp_indices) > 1:
            whole = len(pp_indices) == layout.pp and not parts
            parts.append("pp" if whole else f"pp[{','.join(map(str, pp_indices))}]")
        return BucketGroup("*".join(parts) or name, members, stride, pp_indices, over_ep)

    zero, shard_size = layout.replicas.zero, config.optimizer.shard_size
    if zero == 0:
        return group(1, 1, own), group(copies, 1, every)
    if shard_size is None and zero < 3:
        return group(copies, 1, every), group(1, 1, own)
    size = min(shard_size or copies, copies)
    return group(size, 1, own), group(copies // size, size, every)
