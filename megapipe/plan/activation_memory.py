"""Bytes of activations that a pipeline rank holds while it runs its list of operations."""

import functools
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from megapipe.config import Config
from megapipe.layout.freed import sizes_of
from megapipe.layout.layout import Layout
from megapipe.model.interface import Held, Peaks, bytes_of
from megapipe.plan.context_memory import attention_workspace, packs_documents
from megapipe.schedule.ir import Kind, Op

_Owner = tuple[int, int, int | None]
"""(stage, micro-batch, slice); without a slice the cache, which the slices share."""


class Activations(NamedTuple):
    """Bytes in the memory of the device and of the host."""

    device: int
    host: int


_NOTHING = Activations(0, 0)


class _Piece(NamedTuple):
    """Bytes of one piece at one stage."""

    held: Held
    received: int
    """The stage's input, or its gradient; 0 at the first stage."""
    sent: int
    """The stage's output, or its gradient; 0 at the last stage."""
    cached: int
    """Keys and values of the whole micro-batch; 0 unless the piece is a slice of it."""
    cached_gradients: int
    """Gradients that the slice's I leaves to the slice before it."""
    within: Peaks | None
    """The most that the piece takes while an operation runs, where the family knows."""
    within_built: Peaks | None
    """The same where an R has built the graph of a recomputed stage before."""


def peak_activations(
    config: Config,
    layout: Layout,
    rank: int,
    *,
    inside: bool = True,
    imbalance: Fraction | None = None,
) -> Activations:
    """The most that pipeline rank `rank` holds for its pieces, in either memory.

    A piece holds the tensors that its stage saves from F to I or B, and those that its weight
    gradients need from I to W. At a recomputed stage it holds the input alone until R, I or B
    builds the graph. While an operation runs its piece takes more, as far as the model's family
    knows; without `inside` only the moments between operations count. Messages in transit are left
    out. The experts of a rank get so many times the mean rows of a rank as `imbalance` says, in all
    layers and pieces; without it as many as their capacity allows, or the mean.
    """
    held: dict[_Owner, Activations] = {}
    device = host = most_device = most_host = 0
    for changes in _moments(config, layout, rank, inside, imbalance):
        for owner, now in changes.items():
            before = held.pop(owner, _NOTHING)
            device += now.device - before.device
            host += now.host - before.host
            if now != _NOTHING:
                held[owner] = now
        most_device, most_host = max(most_device, device), max(most_host, host)
    assert not held, "something outlives its W"
    return Activations(most_device, most_host)


def _moments(
    config: Config, layout: Layout, rank: int, inside: bool, imbalance: Fraction | None
) -> Iterator[dict[_Owner, Activations]]:
    """Changes of the bytes held: after each operation, and where an I or B recomputes its stage.

    With `inside` also at the fullest moment of each operation.
    """
    schedule, train = layout.listed, config.train
    rows = [int(schedule.size_of(i) * train.microbatch) for i in range(schedule.microbatches)]
    piece_of = functools.cache(partial(_piece, config, layout, imbalance))
    built: set[_Owner] = set()
    """Graphs of stages that are run again, ahead of the backward."""
    for op in schedule.rank_ops(rank):
        if op.kind == Kind.U:
            continue
        piece = piece_of(op.stage, rows[op.microbatch], op.slice)
        owner = op.stage, op.microbatch, op.slice
        full = Activations(piece.held.device, piece.held.host)
        again = op.stage in schedule.recompute and owner not in built
        within = piece.within_built if owner in built else piece.within
        if inside and within is not None:
            host = full.host if op.kind in (Kind.F, Kind.B, Kind.I) else 0
            after = _cache(op, piece) if op.kind == Kind.F else {}
            yield {owner: Activations(getattr(within, op.kind.name), host), **after}
        if op.kind == Kind.F:
            alone = Activations(piece.received + piece.held.results, 0)
            kept = alone if again else full
            yield {owner: kept, **_cache(op, piece)}
        elif op.kind == Kind.R:
            built.add(owner)
            yield {owner: full}
        elif op.kind in (Kind.B, Kind.I):
            if again:
                yield {owner: full._replace(device=full.device + piece.sent)}
            left = Activations(piece.held.queued, 0) if op.kind == Kind.I else _NOTHING
            yield {owner: left, **_cache(op, piece)}
        else:
            yield {owner: _NOTHING}


def _cache(op: Op, piece: _Piece) -> dict[_Owner, Activations]:
    """Bytes of the micro-batch's cache after an F, I or B."""
    size = piece.cached
    if op.kind != Kind.F:
        size = size + piece.cached_gradients if op.slice else 0
    return {(op.stage, op.microbatch, None): Activations(size, 0)} if piece.cached else {}


def _piece(
    config: Config,
    layout: Layout,
    imbalance: Fraction | None,
    stage: int,
    rows: int,
    slice_: int,
) -> _Piece:
    model, lengths, spec = layout.model, layout.local_lengths, layout.stage_layers[stage]
    sizes = sizes_of(config, layout.device, layout.split, layout.local_length, rows)
    cached = gradients = 0
    if layout.schedule.slices > 1:
        sizes = sizes._replace(sequence=lengths[slice_], before=sum(lengths[:slice_]))
        cached, gradients = model.cached(spec, sizes)
    exchanging = attention_workspace(
        layout, rows, sizes.sequence, sizes.before or 0, packs=packs_documents(config, layout)
    )
    sizes = sizes._replace(exchanging=exchanging, imbalance=imbalance)

    def message(stage: int) -> int:
        """Bytes between a stage and the one that follows."""
        if not 0 <= stage < layout.stages - 1:
            return 0
        return bytes_of(model.message(layout.stage_layers[stage], rows, sizes.sequence))

    spans, again = layout.spans[stage], stage in layout.schedule.recompute
    return _Piece(
        held=model.held(spec, spans, sizes),
        received=message(stage - 1),
        sent=message(stage),
        cached=cached,
        cached_gradients=gradients,
        within=model.peaks(spec, spans, sizes, again=again),
        within_built=model.peaks(spec, spans, sizes, again=False),
    )
