"""Bytes on the wire: what a process sends in one training step, counted before it exists.

:func:`step_traffic` lists every collective of a step, by the mesh axis over which it runs. Bytes
are counted in two ways:

- :attr:`CollectiveTraffic.bytes` is the size of the whole tensor: the input of an all-reduce, a
  reduce-scatter or an all-to-all, the output of an all-gather, a message;
- :attr:`CollectiveTraffic.wire` is what the process itself sends in a ring of n members: (n-1)/n of
  `bytes` for all-gather, reduce-scatter and all-to-all, twice that for all-reduce, and all of it
  for a message or expert replicas.

Traffic of stages over tp, cp and ep is measured by running them (:mod:`megapipe.plan.run`). It
counts for the operation that sends it, so recomputation counts for I, B or R. Gradients are reduced
and weights gathered once per step. ZeRO-2 and 3 (1910.02054) reduce after each series of weight
gradients, ZeRO-3 gathers before each series of uses. Pipeline messages are x and its gradient, or
shards of them that are gathered on arrival (:mod:`megapipe.layout.p2p`). Not counted: traffic of
optimizers that need norms or matrices of whole parameters (LARS, LAMB, Muon), and of
``pipeline.debug``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from math import prod

from megapipe.config.config import Config
from megapipe.distributed.shard_length import shard_length
from megapipe.layout.buckets import BucketGroup, BucketPlan, process_buckets
from megapipe.layout.layout import Layout
from megapipe.model.interface import bytes_of
from megapipe.plan.dp_actions import gathers_of, reductions_of, replica_actions
from megapipe.plan.unit import OPERATIONS, Operation, Transfer, Unit, on_the_wire
from megapipe.plan.units import Units
from megapipe.schedule.op_types import op_types
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

REPLICA_TRAFFIC = ("weights of replicas", "gradients of replicas")
"""Purposes (`what`) of the traffic of expert replicas: weights, and gradients."""

SCALAR = 8
"""Bytes of a count, loss or norm, which are summed in fp64."""

_OTHER_TOTALS = 8
"""Number of scalars in the totals besides squared norms: loss, tokens, requests to stop, save and
finish a save, whether states are finite, tokens of the next step, memory."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """All collectives of one kind, purpose and axis that a process takes part in during a step."""

    axis: str
    """Name of the axis: pp, dp, an axis of a :class:`Transfer`, or a bucket's replicas at several
    pipeline indices, as in dp*pp[0,3]."""
    collective: str
    what: str
    """Purpose; for traffic within stages it is the operation that sends: F, R, I, W or B."""
    count: int
    bytes: int
    members: int
    whole: bool = True
    """Whether `bytes` include a part that the process keeps."""

    @property
    def wire(self) -> Fraction:
        """Bytes that the process itself sends in a step, with ring algorithms."""
        if not self.whole:
            return Fraction(self.bytes)
        return on_the_wire(self.collective, self.bytes, self.members)


def step_traffic(units: Units, rank: int, index: int | None = None) -> list[CollectiveTraffic]:
    """Return the collectives and messages of a process at pipeline index `rank` in a training step.

    Processes of a pipeline index send equally much, except in attention over cp. `index`: cp index
    of the process; default: the index that sends most. Groups of one rank are left out.
    """
    config, layout = units.config, units.layout
    exchanges = [
        *_of_stages(units, rank, index),
        *_data_parallel(config, layout, rank),
        *_pipeline(config, layout, rank),
        *_scalars(config, layout),
    ]
    return [exchange for exchange in exchanges if exchange.members > 1 and exchange.count]


def by_axis(exchanges: Iterable[CollectiveTraffic]) -> dict[str, Fraction]:
    """Return the bytes that a process sends in a step, by axis."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.axis)
    return {
        axis: sum((exchange.wire for exchange in group), Fraction(0))
        for axis, group in groupby(ordered, key=lambda exchange: exchange.axis)
    }


def message_bytes(
    layout: Layout, stage: int, rows: int, length: int, *, gradient: bool = False
) -> int:
    """Return the bytes that one tensor-parallel rank sends to the next pipeline rank after `stage`,
    for `rows` samples of `length` positions; with `gradient`, those that the next rank returns."""
    tensors = layout.model.output_shape(layout.stage_layers[stage], rows, length)
    if gradient:
        tensors = tuple(each for each in tensors if each.has_grad)
    if not layout.scatters:
        return bytes_of(tensors)
    return sum(
        each.bytes // prod(each.shape) * shard_length(prod(each.shape), layout.tp)
        for each in tensors
    )


def largest_message(config: Config, layout: Layout) -> int:
    """Return the bytes of the largest message between stages for a micro-batch; 0 for one stage."""
    train = config.train
    return max(
        (
            message_bytes(layout, stage, train.microbatch, layout.local_length)
            for stage in range(layout.stages - 1)
        ),
        default=0,
    )


def operation_transfers(
    units: Units, stage: int, kind: Operation, *, recomputes: bool = True
) -> list[Transfer]:
    """Return the collectives of one operation on a whole micro-batch, on the cp rank that sends
    most. If the stage is recomputed as a whole, the recomputation's collectives are in R, not in I
    or B. Without `recomputes`, the collectives of recomputed layers are left out of I and B too."""
    if not _exchanges(units.layout):
        return []
    index = units.index_with_most(stage, _over_cp)
    source = units if recomputes else units.without_recomputation
    slices = _units(source, stage, None, index)
    return [each for unit in slices for each in unit.transfers(kind)]


def _units(units: Units, stage: int, rows: int | None, index: int) -> list[Unit]:
    """Return a stage's costs for evenly chosen experts, even if the experts have a capacity."""
    capacity = units.config.model.moe.capacity_factor
    imbalance = None if capacity is None else Fraction(1)
    return units.of(stage, rows=rows, imbalance=imbalance, index=index)


def _exchanges(layout: Layout) -> bool:
    """Whether stages of a layout communicate within operations: over tp, cp or ep."""
    return max(layout.tp, layout.cp, layout.ep_ranks) > 1


def _over_cp(unit: Unit) -> float:
    """Return the bytes that a rank sends to other context-parallel ranks."""
    every = (each for kind in unit.operations if kind != "B" for each in unit.transfers(kind))
    return float(sum(each.wire for each in every if each.axis in ("cp", "ulysses")))


def _of_stages(units: Units, rank: int, index: int | None) -> Iterator[CollectiveTraffic]:
    """Yield the traffic within a process's stages, in all operations of a step."""
    layout = units.layout
    if not _exchanges(layout):
        return
    counts: Counter[tuple[str, str, str, int]] = Counter()
    amounts: Counter[tuple[str, str, str, int]] = Counter()
    ranks = layout.process_ranks(rank)
    types = Counter(each for own in ranks for each in op_types(layout.schedule, own))
    for what, times in types.items():
        if index is None:
            at = units.index_with_most(what.stage, _over_cp)
        else:
            at = layout.split.index(layout.split.coordinates(index)[0], 0)
        rows = int(what.size * units.config.train.microbatch)
        unit = _units(units, what.stage, rows, at)[what.slice]
        operation = OPERATIONS[what.kind]
        rebuilding = unit.transfers("R") if what.rebuilds else []
        for each in unit.transfers(operation) + rebuilding:
            key = each.axis, each.kind, operation, each.members
            counts[key] += times
            amounts[key] += times * each.bytes
    for (axis, collective, run, members), count in counts.items():
        amount = amounts[axis, collective, run, members]
        yield CollectiveTraffic(axis, collective, run, count, amount, members)


def _data_parallel(config: Config, layout: Layout, rank: int) -> Iterator[CollectiveTraffic]:
    main = main_bytes(config.model.dtype)
    actions = replica_actions(layout, rank) if layout.replicas.zero >= 2 else []
    ends = (0, layout.stages - 1)
    for bucket in process_buckets(config, layout, rank):
        users = ends if bucket.stage == layout.stages else (bucket.stage,)
        reductions = gathers = 1
        if bucket.sharded_grads:
            reductions = reductions_of(actions, bucket.stage)
        if bucket.sharded_weights:
            gathers = gathers_of(actions, users)
        weights = gathers * bucket.numel * DTYPE_BYTES[config.model.dtype]
        gather = CollectiveTraffic(
            bucket.shard.axis, "all_gather", "weights", gathers, weights, bucket.shard.members
        )
        if bucket.frozen:
            if bucket.sharded_weights:
                yield gather
            continue
        yield from reduction(config, bucket, reductions)
        partial = (
            bucket.replicated_numel
            if config.parallel.sequence_parallel
            else bucket.head_partial_numel
        )
        if partial:
            what = "sequence shards" if config.parallel.sequence_parallel else "parts of heads"
            parts = reductions * partial * main
            yield CollectiveTraffic("tp", "all_reduce", what, reductions, parts, layout.tp)
        if bucket.link:
            yield _tied_message(config, layout, bucket)
        if bucket.updates:
            yield gather
        if bucket.slots:
            yield from _replica_traffic(config, layout, bucket)


def _replica_traffic(
    config: Config, layout: Layout, bucket: BucketPlan
) -> Iterator[CollectiveTraffic]:
    """Yield the traffic of expert replicas if all slots are full: weights that a rank receives, and
    gradients that it sends. An owner sends and receives more if its experts have more replicas than
    a rank has slots."""
    stage = layout.stage_layers[bucket.stage]
    layers = len(layout.model.experts().keys() & {*stage.layers})
    sizes = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    for what, size in zip(REPLICA_TRAFFIC, sizes, strict=True):
        amount = bucket.replica_numel * size
        yield CollectiveTraffic(
            "ep", "all_to_all", what, layers, amount, layout.ep_ranks, whole=False
        )


def _tied_message(config: Config, layout: Layout, bucket: BucketPlan) -> CollectiveTraffic:
    """Return the message between the two stages with a tied embedding: new weights from the stage
    that updates them, or reduced gradients from the other one."""
    if bucket.updates:
        what, size = "tied weights", bucket.numel * DTYPE_BYTES[config.model.dtype]
    else:
        main = main_bytes(config.model.dtype)
        what, size = "tied gradients", bucket.numel // bucket.shard.members * main
    return CollectiveTraffic("pp", "send", what, 1, size, layout.pp)


def reduction(config: Config, bucket: BucketPlan, count: int) -> Iterator[CollectiveTraffic]:
    """Yield the collectives that reduce a bucket's gradients over its shard and replicate groups,
    `count` times in a step.

    If gradients are sent in a narrower type than main gradients have, all-to-alls send each shard
    to its owner, which sums it; the replicate group then gathers the sums.
    """
    shard, replicate = bucket.shard, bucket.replicate
    piece = bucket.numel // shard.members

    def exchange(group: BucketGroup, collective: str, numel: int, size: int) -> CollectiveTraffic:
        return CollectiveTraffic(
            group.axis, collective, "gradients", count, count * numel * size, group.members
        )

    main = main_bytes(config.model.dtype)
    narrow = DTYPE_BYTES[config.optimizer.reduce_dtype or config.model.dtype]
    if config.optimizer.reduce_dtype is None or narrow == main:
        yield exchange(shard, "reduce_scatter", bucket.numel, main)
        yield exchange(replicate, "all_reduce", piece, main)
    else:
        yield exchange(shard, "all_to_all", bucket.numel, narrow)
        yield exchange(replicate, "all_to_all", piece, narrow)
        yield exchange(replicate, "all_gather", piece, narrow)


def _pipeline(config: Config, layout: Layout, rank: int) -> Iterator[CollectiveTraffic]:
    """Yield the messages of a rank, and the all-gathers over tp that join sharded messages."""
    if layout.in_process:
        return
    sent = list(pipeline_messages(config, layout, rank))
    yield from sent
    if layout.scatters:
        count, amount = sum(each.count for each in sent), sum(each.bytes for each in sent)
        yield CollectiveTraffic(
            "tp", "all_gather", "messages", count, layout.tp * amount, layout.tp
        )


def pipeline_messages(config: Config, layout: Layout, rank: int) -> Iterator[CollectiveTraffic]:
    """Yield the messages that a pipeline rank sends, by peer. For each work item it sends an output
    to the next stage's rank, and a gradient to the previous stage's rank."""
    schedule = layout.schedule
    messages: Counter[int] = Counter()
    amounts: Counter[int] = Counter()
    for (replica, size), count in schedule.numbers.items():
        rows = int(size * config.train.microbatch)
        for stage, border in enumerate(pairwise(schedule.placement.table[replica])):
            if rank not in border or border[0] == border[1]:
                continue
            peer = sum(border) - rank
            messages[peer] += count * schedule.slices
            amounts[peer] += count * sum(
                message_bytes(layout, stage, rows, length, gradient=rank == border[1])
                for length in layout.local_lengths
            )
    for peer, count in sorted(messages.items()):
        yield CollectiveTraffic("pp", "send", f"to {peer}", count, amounts[peer], layout.pp)


def _scalars(config: Config, layout: Layout) -> Iterator[CollectiveTraffic]:
    """Yield the all-gathers that sum scalars in a fixed order. The count of unmasked tokens is
    summed before the first backward, or in later steps of a flushing pipeline with the totals of
    the preceding step. A step's totals include squared norms of each stage and the tied matrix."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pipeline_processes}
    ends = {rank_of[-1] for rank_of in layout.schedule.placement.table}
    routing_stats = sum(layout.model.routing_stat_counts().values())
    for what, axes, length in (
        ("tokens", ("cp", "dp", "pp") if len(ends) > 1 else ("cp", "dp"), 1),
        ("totals", ("tp", "cp", "dp", "pp"), layout.stages + 1 + _OTHER_TOTALS + routing_stats),
    ):
        for axis in axes:
            total = sizes[axis] * length * SCALAR
            yield CollectiveTraffic(axis, "all_gather", what, 1, total, sizes[axis])
