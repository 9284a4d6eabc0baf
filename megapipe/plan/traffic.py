"""Bytes on the wire: what a process sends in one training step, counted before it exists.

:func:`step_traffic` lists every collective of a step, by the mesh axis over which it runs. Two
conventions of bytes:

- :attr:`CollectiveTraffic.bytes` is the size of the whole tensor: the input of an all-reduce, a
  reduce-scatter or an all-to-all, the output of an all-gather, a message;
- :attr:`CollectiveTraffic.wire` is what the process itself sends in a ring of n members: (n-1)/n of
`bytes`   for all-gather, reduce-scatter and all-to-all, twice that for all-reduce, all of a message
and of   copies of experts.

What stages exchange over tp, cp and ep is that of a run of theirs (:mod:`megapipe.plan.run`), in
the operation that exchanges it: what is run again in I, B or R counts there.
Gradients are reduced and weights gathered once per step, with ZeRO-2 and 3 (1910.02054) after each
run of weight gradients and before each run of uses. The pipeline sends x and its gradient, or
shares of them that are gathered on arrival (:mod:`megapipe.layout.links`). Traffic of optimizers
that need norms or matrices of whole parameters (LARS, LAMB, Muon) and of ``pipeline.debug`` is not
counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, pairwise
from math import prod

from megapipe.config.config import Config
from megapipe.distributed.shares import shard_length
from megapipe.layout.buckets import BucketGroup, BucketPlan, process_buckets
from megapipe.layout.layout import Layout
from megapipe.model.interface import bytes_of
from megapipe.plan.replicas import gathers_of, reductions_of, replica_actions
from megapipe.plan.unit import OPERATIONS, Operation, Transfer, Unit, on_the_wire
from megapipe.plan.units import Units
from megapipe.schedule.op_types import op_types
from megapipe.util.dtypes import DTYPE_BYTES, main_bytes

REPLICA_TRAFFIC = ("copies", "gradients of copies")
"""Exchanges of experts that ranks have copies of: weights, and gradients."""

SCALAR = 8
"""Counts, losses and norms are summed in fp64."""

_OTHER_TOTALS = 8
"""Numbers in the totals beside squared norms: loss, tokens, requests to stop, save and finish a
save, whether states are finite, tokens of the next step, memory."""


@dataclass(frozen=True)
class CollectiveTraffic:
    """All collectives of one kind, purpose and axis that a process enters in a step."""

    axis: str
    """pp, dp, that of a :class:`Transfer`, or the holders of a bucket: dp x pipeline indices, as in
    dp*pp[0,3]."""
    collective: str
    what: str
    """Purpose; of what stages exchange, the operation that does it: F, R, I, W or B."""
    count: int
    bytes: int
    members: int
    whole: bool = True
    """A part of `bytes` is for the process itself."""

    @property
    def wire(self) -> Fraction:
        """Bytes that the process sends in a step under a ring."""
        if not self.whole:
            return Fraction(self.bytes)
        return on_the_wire(self.collective, self.bytes, self.members)


def step_traffic(units: Units, rank: int, index: int | None = None) -> list[CollectiveTraffic]:
    """Collectives and messages of each process at pipeline index `rank` in a training step.

    All dp, cp and tp indices exchange alike, but for what those of cp send while they attend: then
    it is the one of `index`, by default the one that sends most. Groups of one exchange nothing and
    are left out.
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
    """Bytes that a process sends in a step, by axis."""
    ordered = sorted(exchanges, key=lambda exchange: exchange.axis)
    return {
        axis: sum((exchange.wire for exchange in group), Fraction(0))
        for axis, group in groupby(ordered, key=lambda exchange: exchange.axis)
    }


def message_bytes(
    layout: Layout, stage: int, rows: int, length: int, *, gradient: bool = False
) -> int:
    """Bytes of the output of `stage`, for `rows` rows of `length` positions, that one
    tensor-parallel rank sends to the next pipeline rank; or of its `gradient`, sent back."""
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
    """Bytes of the largest message of a whole micro-batch between two stages; 0 for one stage."""
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
    """Collectives of one F, R, I, W or B of a whole micro-batch at a stage, on the rank of cp that
    sends most. An I or B finds what an R has built; unless `recomputes`, also the activations of
    layers that run again."""
    if not _exchanges(units.layout):
        return []
    index = units.index_with_most(stage, _over_cp)
    source = units if recomputes else units.without_recomputation
    slices = _units(source, stage, None, index)
    return [each for unit in slices for each in unit.transfers(kind)]


def _units(units: Units, stage: int, rows: int | None, index: int) -> list[Unit]:
    """Units of a stage whose experts are chosen evenly, where without more words they would get as
    many rows as their capacity allows."""
    capacity = units.config.model.moe.capacity
    imbalance = None if capacity is None else Fraction(1)
    return units.of(stage, rows=rows, imbalance=imbalance, index=index)


def _exchanges(layout: Layout) -> bool:
    """Whether stages of a layout exchange anything but messages."""
    return max(layout.tp, layout.cp, layout.ep_ranks) > 1


def _over_cp(unit: Unit) -> float:
    """Bytes that a rank sends to those of other positions."""
    every = (each for kind in unit.operations if kind != "B" for each in unit.transfers(kind))
    return float(sum(each.wire for each in every if each.axis in ("cp", "ulysses")))


def _of_stages(units: Units, rank: int, index: int | None) -> Iterator[CollectiveTraffic]:
    """Exchanges of a process' stages in all operations of a step."""
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
            at = layout.split.index(layout.split.place(index)[0], 0)
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
            yield _copied(config, layout, bucket)
        if bucket.updates:
            yield gather
        if bucket.slots:
            yield from _of_copies(config, layout, bucket)


def _of_copies(config: Config, layout: Layout, bucket: BucketPlan) -> Iterator[CollectiveTraffic]:
    """Weights of experts on their way to copies, and gradients of these on their way home, where
    all slots are full: what a rank gets of one, and sends of the other. An owner whose experts have
    more copies than a rank has slots sends, and gets, more."""
    stage = layout.stage_layers[bucket.stage]
    layers = len(layout.model.experts().keys() & {*stage.layers})
    sizes = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    for what, size in zip(REPLICA_TRAFFIC, sizes, strict=True):
        amount = bucket.replica_numel * size
        yield CollectiveTraffic(
            "ep", "all_to_all", what, layers, amount, layout.ep_ranks, whole=False
        )


def _copied(config: Config, layout: Layout, bucket: BucketPlan) -> CollectiveTraffic:
    """The message between two stages that have the same parameters: new weights from the one that
    updates them, summed gradients from the other."""
    if bucket.updates:
        what, size = "tied weights", bucket.numel * DTYPE_BYTES[config.model.dtype]
    else:
        main = main_bytes(config.model.dtype)
        what, size = "tied gradients", bucket.numel // bucket.shard.members * main
    return CollectiveTraffic("pp", "send", what, 1, size, layout.pp)


def reduction(config: Config, bucket: BucketPlan, count: int) -> Iterator[CollectiveTraffic]:
    """Collectives that sum a bucket's gradients over shard x replicate, `count` times in a step.

    In a type narrower than the main gradients', all-to-alls bring each slice to its owner, which
    adds it up; the replicate group then gathers the sums.
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
    """The messages of a rank; where shares are sent, those that arrive are gathered over tp."""
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
    """A message forward and one back, per piece, at each border between two ranks, by peer."""
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
    """Sums in a fixed order are all-gathers: the unmasked tokens before the first backward, which
    in later steps come with the totals of the one before where the pipeline is flushed, and at the
    end the totals of the step, with the squared norms of each stage and of the tied matrix."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pipeline_processes}
    ends = {homes[-1] for homes in layout.schedule.placement.table}
    told = sum(layout.model.routing_stat_counts().values())
    for what, axes, length in (
        ("tokens", ("cp", "dp", "pp") if len(ends) > 1 else ("cp", "dp"), 1),
        ("totals", ("tp", "cp", "dp", "pp"), layout.stages + 1 + _OTHER_TOTALS + told),
    ):
        for axis in axes:
            total = sizes[axis] * length * SCALAR
            yield CollectiveTraffic(axis, "all_gather", what, 1, total, sizes[axis])
