"""Bytes on the wire: what a process sends in one training step, counted before it exists.

:func:`step_traffic` lists every collective of a step, by the mesh axis over which it runs. Two
conventions of bytes:

- :attr:`Exchange.bytes` is the size of the whole tensor: the input of an all-reduce, a
  reduce-scatter or an all-to-all, the output of an all-gather, a message;
- :attr:`Exchange.wire` is what the process itself sends in a ring of n members: (n-1)/n of `bytes`
  for all-gather, reduce-scatter and all-to-all, twice that for all-reduce, all of a message and of
  copies of experts.

Tensor parallelism (Shoeybi et al., 1909.08053) all-reduces the hidden states x twice per layer in
the forward and twice in the input gradient; with sequence parallelism (2205.05198) each of these
is an all-gather and a reduce-scatter, and the weight gradients gather again what was not kept: the
inputs, and where they wait for ``W`` the gradients too.
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
from functools import cache
from itertools import groupby, pairwise
from math import prod
from typing import NamedTuple

from megapipe.config import Config
from megapipe.distributed.shares import share
from megapipe.dtypes import DTYPE_BYTES, main_bytes
from megapipe.layers.policy import loss_chunk
from megapipe.layout.context_plan import Pass
from megapipe.layout.layout import Layout
from megapipe.model.interface import Among, Collective, TensorTraffic, bytes_of
from megapipe.plan.buckets import BucketPlan, Group, process_buckets
from megapipe.plan.context_traffic import Sent, attention_traffic, attentions
from megapipe.plan.replicas import gathers_of, reductions_of, replica_actions
from megapipe.schedule.ir import Kind

BETWEEN_NODES = "ep between nodes"
"""Axis of the ranks that have one place in each node, over which experts are split."""

OF_COPIES = ("copies", "gradients of copies")
"""Exchanges of experts that ranks have copies of: weights, and gradients."""

SCALAR = 8
"""Counts, losses and norms are summed in fp64."""

_OTHER_TOTALS = 7
"""Numbers in the totals beside squared norms: loss, tokens, requests to stop, save and finish a
save, whether states are finite, memory."""


@dataclass(frozen=True)
class Exchange:
    """All collectives of one kind, purpose and axis that a process enters in a step."""

    axis: str
    """tp, dp, pp, or the holders of a bucket: dp x pipeline indices, as in dp*pp[0,3]."""
    collective: Collective
    what: str
    count: int
    bytes: int
    members: int
    whole: bool = True
    """A part of `bytes` is for the process itself."""

    @property
    def wire(self) -> Fraction:
        """Bytes that the process sends in a step under a ring."""
        if self.collective == "send" or not self.whole:
            return Fraction(self.bytes)
        ways = 2 if self.collective == "all_reduce" else 1
        return Fraction(ways * self.bytes * (self.members - 1), self.members)


def step_traffic(
    config: Config, layout: Layout, rank: int, index: int | None = None
) -> list[Exchange]:
    """Collectives and messages of each process at pipeline index `rank` in a training step.

    All dp, cp and tp indices exchange alike, but for what those of cp send while they attend: then
    it is the one of `index`, by default the one that sends most. Groups of one exchange nothing and
    are left out.
    """
    exchanges = [
        *_tensor_parallel(config, layout, rank),
        *_context_parallel(config, layout, rank, index),
        *_about_tokens(config, layout, rank),
        *_data_parallel(config, layout, rank),
        *_pipeline(config, layout, rank),
        *_scalars(config, layout),
    ]
    return [exchange for exchange in exchanges if exchange.members > 1 and exchange.count]


def by_axis(exchanges: Iterable[Exchange]) -> dict[str, Fraction]:
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
    tensors = layout.model.message(layout.stage_layers[stage], rows, length)
    if gradient:
        tensors = tuple(each for each in tensors if each.has_grad)
    if not layout.scatters:
        return bytes_of(tensors)
    return sum(
        each.bytes // prod(each.shape) * share(prod(each.shape), layout.tp) for each in tensors
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


def operation_traffic(config: Config, layout: Layout, stage: int, kind: str) -> Fraction:
    """Bytes of hidden states that a process sends to its tp peers in one F, I, W or B of a whole
    micro-batch; a recomputed forward counts with the F."""
    if layout.tp == 1:
        return Fraction(0)
    traffic = _stage_traffic(layout, stage, fused=kind == "B")
    tokens = layout.local_length * config.train.microbatch
    whole = tokens * DTYPE_BYTES[layout.model.dtype]
    sent = [
        Exchange("tp", collective, what, count, values * whole, layout.tp).wire
        for (collective, what), (count, values) in traffic.hidden.items()
        if what in ("IW" if kind == "B" else kind)
    ]
    return sum(sent, Fraction(0))


def _tensor_parallel(config: Config, layout: Layout, rank: int) -> Iterator[Exchange]:
    """Per piece of a micro-batch, the collectives of its stages' layers and of the loss."""
    if layout.tp == 1:
        return
    for stage in layout.process_stages(rank):
        split, fused = (
            [piece.tokens for piece in _pieces(config, layout, stage, rank, fused=fused)]
            for fused in (False, True)
        )
        per_pass = [_stage_traffic(layout, stage, fused=fused) for fused in (False, True)]
        size = DTYPE_BYTES[layout.model.dtype]
        for collective, what in per_pass[0].hidden:
            counts, values = zip(*(of.hidden[collective, what] for of in per_pass), strict=True)
            yield Exchange(
                axis="tp",
                collective=collective,
                what=what,
                count=counts[0] * len(split) + counts[1] * len(fused),
                bytes=(values[0] * sum(split) + values[1] * sum(fused)) * size,
                members=layout.tp,
            )
        pieces = split + fused
        if per_pass[0].loss_numbers:
            forwards = 1 + (stage in layout.schedule.recompute)
            most = layout.loss_chunk
            chunks = sum(-(-n // loss_chunk(n, most)) if most else 1 for n in pieces)
            size = layout.tp * per_pass[0].loss_numbers * main_bytes(layout.model.dtype)
            yield Exchange(
                axis="tp",
                collective="all_gather",
                what="loss",
                count=forwards * chunks,
                bytes=forwards * sum(pieces) * size,
                members=layout.tp,
            )


def _context_parallel(
    config: Config, layout: Layout, rank: int, index: int | None
) -> Iterator[Exchange]:
    """Exchanges of attention over cp, of an index or of that which sends most."""
    if layout.cp == 1:
        return
    counts: Counter[tuple[str, Pass, Collective, int]] = Counter()
    amounts: Counter[tuple[str, Pass, Collective, int]] = Counter()
    sent_in = cache(lambda tokens, earlier: _sent(layout, tokens, earlier, index))
    for stage in layout.process_stages(rank):
        for piece in (
            each
            for fused in (False, True)
            for each in _pieces(config, layout, stage, rank, fused=fused)
        ):
            for of, exchanges in sent_in(piece.tokens, piece.earlier).items():
                for sent in exchanges:
                    times = attentions(layout, stage, of, sent.axis)
                    key = sent.axis, of, sent.collective, sent.members
                    counts[key] += times * sent.calls
                    amounts[key] += times * sent.bytes
    for key, count in counts.items():
        axis, what, collective, members = key
        yield Exchange(axis, collective, what, count, amounts[key], members)


def _about_tokens(config: Config, layout: Layout, rank: int) -> Iterator[Exchange]:
    """Exchanges about tokens, of all pieces."""
    for stage in layout.process_stages(rank):
        for fused in (False, True):
            for piece in _pieces(config, layout, stage, rank, fused=fused):
                yield from token_exchanges(layout, stage, piece.rows, piece.length * layout.cp)


def token_exchanges(
    layout: Layout, stage: int, rows: int, length: int | None = None
) -> Iterator[Exchange]:
    """Exchanges about the tokens of `rows` sequences, or of a slice of such a `length` of them, of
    ranks with parts of the same sequences or of experts; their rows are those of experts that are
    chosen evenly."""
    axes = {"cp": layout.cp, "tp": layout.tp}
    name = "*".join(name for name, size in axes.items() if size > 1)
    node = layout.node or 1
    groups: dict[Among, tuple[str, int]] = {
        "sequence": (name, layout.cp * layout.tp),
        "ep": ("ep", layout.expert_ranks),
        "ep in a node": ("ep in a node", node),
        "ep between nodes": (BETWEEN_NODES, layout.expert_ranks // node),
    }
    for each in layout.model.token_traffic(
        layout.stage_layers[stage],
        layout.spans[stage],
        rows,
        sum(layout.slice_lengths) if length is None else length,
        again=stage in layout.schedule.recompute,
    ):
        axis, members = groups[each.among]
        yield Exchange(axis, each.collective, each.what, each.calls, each.bytes, members)


def _sent(layout: Layout, tokens: int, earlier: int, index: int | None) -> dict[Pass, list[Sent]]:
    """In one attention of a piece, by the context-parallel rank of an index, or by the one that
    sends most. Those that split heads send alike."""
    members = (layout.split.index(ring, 0) for ring in range(layout.split.ring))
    indices = members if index is None else (index,)
    ranks = [attention_traffic(layout, tokens, each, earlier) for each in indices]
    return max(ranks, key=lambda sent: sum(each.bytes for of in sent.values() for each in of))


class _Piece(NamedTuple):
    """Rows of a micro-batch, or a slice of them, of a context-parallel rank."""

    rows: int
    length: int
    earlier: int
    """Tokens of earlier slices."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def _pieces(
    config: Config, layout: Layout, stage: int, rank: int, *, fused: bool
) -> Iterator[_Piece]:
    """Those that `stage` computes on pipeline rank `rank` and whose backward is a B (`fused`), or
    an I and a W (otherwise)."""
    schedule = layout.schedule
    kind = Kind.B if fused else Kind.I
    for own in layout.process_ranks(rank):
        for op in schedule.rank_ops(own):
            if op.stage == stage and op.kind == kind:
                rows = int(schedule.size_of(op.microbatch) * config.train.microbatch)
                lengths = layout.local_lengths
                yield _Piece(rows, lengths[op.slice], rows * sum(lengths[: op.slice]))


def _stage_traffic(layout: Layout, stage: int, *, fused: bool) -> TensorTraffic:
    """Tensor-parallel collectives of one pass of a piece through a stage."""
    again = stage in layout.schedule.recompute
    spec, spans = layout.stage_layers[stage], layout.spans[stage]
    return layout.model.tensor_traffic(spec, spans, again=again, fused=fused)


def _data_parallel(config: Config, layout: Layout, rank: int) -> Iterator[Exchange]:
    zero, main = layout.replicas.zero, main_bytes(config.model.dtype)
    actions = replica_actions(layout, rank) if zero >= 2 else []
    ends = (0, layout.stages - 1)
    for bucket in process_buckets(config, layout, rank):
        users = ends if bucket.stage == layout.stages else (bucket.stage,)
        reductions = gathers = 1
        if zero >= 2 and bucket.in_runs:
            reductions = reductions_of(actions, bucket.stage)
        if zero == 3:
            gathers = gathers_of(actions, users)
        weights = gathers * bucket.numel * DTYPE_BYTES[config.model.dtype]
        gather = Exchange(
            bucket.shard.axis, "all_gather", "weights", gathers, weights, bucket.shard.members
        )
        if bucket.frozen:
            if zero == 3:
                yield gather
            continue
        yield from reduction(config, bucket, reductions)
        partial = bucket.whole if config.parallel.sequence_parallel else bucket.of_heads
        if partial:
            what = "sequence shards" if config.parallel.sequence_parallel else "parts of heads"
            parts = reductions * partial * main
            yield Exchange("tp", "all_reduce", what, reductions, parts, layout.tp)
        if bucket.linked:
            yield _copied(config, layout, bucket)
        if bucket.updates:
            yield gather
        if bucket.slots:
            yield from _of_copies(config, layout, bucket)


def _of_copies(config: Config, layout: Layout, bucket: BucketPlan) -> Iterator[Exchange]:
    """Weights of experts on their way to copies, and gradients of these on their way home, where
    all slots are full: what a rank gets of one, and sends of the other. An owner whose experts have
    more copies than a rank has slots sends, and gets, more."""
    stage = layout.stage_layers[bucket.stage]
    layers = len(layout.model.experts().keys() & {*stage.layers})
    sizes = DTYPE_BYTES[config.model.dtype], main_bytes(config.model.dtype)
    for what, size in zip(OF_COPIES, sizes, strict=True):
        amount = bucket.copies * size
        yield Exchange("ep", "all_to_all", what, layers, amount, layout.expert_ranks, whole=False)


def _copied(config: Config, layout: Layout, bucket: BucketPlan) -> Exchange:
    """The message between two stages that have the same parameters: new weights from the one that
    updates them, summed gradients from the other."""
    if bucket.updates:
        what, size = "tied weights", bucket.numel * DTYPE_BYTES[config.model.dtype]
    else:
        main = main_bytes(config.model.dtype)
        what, size = "tied gradients", bucket.numel // bucket.shard.members * main
    return Exchange("pp", "send", what, 1, size, layout.pp)


def reduction(config: Config, bucket: BucketPlan, count: int) -> Iterator[Exchange]:
    """Collectives that sum a bucket's gradients over shard x replicate, `count` times in a step.

    In a type narrower than the main gradients', all-to-alls bring each slice to its owner, which
    adds it up; the replicate group then gathers the sums.
    """
    shard, replicate = bucket.shard, bucket.replicate
    piece = bucket.numel // shard.members

    def exchange(group: Group, collective: Collective, numel: int, size: int) -> Exchange:
        return Exchange(
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


def _pipeline(config: Config, layout: Layout, rank: int) -> Iterator[Exchange]:
    """The messages of a rank; where shares are sent, those that arrive are gathered over tp."""
    if layout.in_process:
        return
    sent = list(pipeline_messages(config, layout, rank))
    yield from sent
    if layout.scatters:
        count, amount = sum(each.count for each in sent), sum(each.bytes for each in sent)
        yield Exchange("tp", "all_gather", "messages", count, layout.tp * amount, layout.tp)


def pipeline_messages(config: Config, layout: Layout, rank: int) -> Iterator[Exchange]:
    """A message forward and one back, per piece, at each border between two ranks, by peer."""
    schedule = layout.schedule
    alike = Counter(
        (schedule.direction_of(microbatch), schedule.size_of(microbatch))
        for microbatch in range(schedule.microbatches)
    )
    messages: Counter[int] = Counter()
    amounts: Counter[int] = Counter()
    for (replica, size), count in alike.items():
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
        yield Exchange("pp", "send", f"to {peer}", count, amounts[peer], layout.pp)


def _scalars(config: Config, layout: Layout) -> Iterator[Exchange]:
    """Sums in a fixed order are all-gathers: the unmasked tokens before the first backward, and at
    the end the totals of the step, with the squared norms of each stage and of the tied matrix."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pipeline_processes}
    ends = {homes[-1] for homes in layout.schedule.placement.table}
    told = sum(layout.model.told().values())
    for what, axes, length in (
        ("tokens", ("cp", "dp", "pp") if len(ends) > 1 else ("cp", "dp"), 1),
        ("totals", ("tp", "cp", "dp", "pp"), layout.stages + 1 + _OTHER_TOTALS + told),
    ):
        for axis in axes:
            total = sizes[axis] * length * SCALAR
            yield Exchange(axis, "all_gather", what, 1, total, sizes[axis])
