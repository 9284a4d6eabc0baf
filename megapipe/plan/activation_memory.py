"""Bytes of activations that a pipeline rank holds, as its list of operations goes."""

import functools
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from megapipe.config import Config
from megapipe.dtypes import DTYPE_BYTES
from megapipe.layout.layout import Layout
from megapipe.model.gpt.saved import Held, Sizes, cache_bytes, cache_gradients, stage_held
from megapipe.model.gpt.workspace import Peaks, peaks
from megapipe.schedule.ir import Kind, Op

_Owner = tuple[int, int, int | None]
"""(stage, micro-batch, slice); without a slice the cache, which the slices share."""


class Activations(NamedTuple):
    """Bytes in the memory of the device and of the host."""

    device: int
    host: int


_NOTHING = Activations(0, 0)


class _Piece(NamedTuple):
    """Bytes of a micro-batch, a part or a slice of one, at one stage."""

    held: Held
    message: int
    """Of its hidden states, or their gradient."""
    cached: int
    """Keys and values of the whole micro-batch; 0 unless this is a slice of it."""
    cached_gradients: int
    """Gradients that its I leaves to the slice before it."""
    within: Peaks
    """The most that it takes while an operation runs."""
    within_built: Peaks
    """The same, where the graph of a stage that is run again is there already."""


def peak_activations(
    config: Config, layout: Layout, rank: int, *, inside: bool = True
) -> Activations:
    """The most that pipeline rank `rank` holds for its pieces, in either memory.

    Pieces hold from F to I or B what their stage saves, from I to W what weight gradients wait
    with. A stage that is run again holds its input, until the backward builds the graph. While an
    operation runs its piece takes more (:mod:`megapipe.model.gpt.workspace`); without `inside` that
    is left out, and the peak is that between operations. Messages on their way come on top.
    """
    held: dict[_Owner, Activations] = {}
    device = host = most_device = most_host = 0
    for changes in _moments(config, layout, rank, inside):
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
    config: Config, layout: Layout, rank: int, inside: bool
) -> Iterator[dict[_Owner, Activations]]:
    """Changes of what is held: after each operation, and in one when a graph is built again.

    With `inside` also at the fullest moment of each.
    """
    schedule, train = layout.schedule, config.train
    rows = [int(schedule.size_of(i) * train.microbatch) for i in range(schedule.microbatches)]
    piece_of = functools.cache(partial(_piece, config, layout))
    built: set[_Owner] = set()
    """Graphs of stages that are run again, ahead of the backward."""
    for op in schedule.rank_ops(rank):
        stage = layout.stage_layers[op.stage]
        piece = piece_of(op.stage, rows[op.microbatch], op.slice)
        owner = op.stage, op.microbatch, op.slice
        full = Activations(piece.held.device, piece.held.host)
        again = op.stage in schedule.recompute and owner not in built
        if inside:
            within = piece.within_built if owner in built else piece.within
            host = full.host if op.kind in (Kind.F, Kind.B, Kind.I) else 0
            after = _cache(op, piece) if op.kind == Kind.F else {}
            yield {owner: Activations(getattr(within, op.kind.name), host), **after}
        if op.kind == Kind.F:
            kept = Activations(0 if stage.embedding else piece.message, 0) if again else full
            yield {owner: kept, **_cache(op, piece)}
        elif op.kind == Kind.R:
            built.add(owner)
            yield {owner: full}
        elif op.kind in (Kind.B, Kind.I):
            if again:
                grad = 0 if stage.head else piece.message
                yield {owner: full._replace(device=full.device + grad)}
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


def _piece(config: Config, layout: Layout, stage: int, rows: int, slice_: int) -> _Piece:
    model, lengths, spec = config.model, layout.slice_lengths, layout.stage_layers[stage]
    cuda, split = layout.device == "cuda", config.parallel.sequence_parallel
    whole = sizes = Sizes(config.train.sequence_length, rows, layout.tp, split, cuda)
    cached = gradients = 0
    if layout.schedule.slices > 1:
        sizes = whole._replace(sequence=lengths[slice_], before=sum(lengths[:slice_]))
        cached = cache_bytes(model, len(spec.layers), whole)
        gradients = cache_gradients(model, len(spec.layers), sizes)
    tokens = sizes.sequence * rows // (layout.tp if split else 1)
    most, spans = layout.loss_chunk, layout.spans[stage]
    again = stage in layout.schedule.recompute
    return _Piece(
        held=stage_held(model, spec, spans, sizes, loss_chunk=most),
        message=tokens * model.hidden * DTYPE_BYTES[model.dtype],
        cached=cached,
        cached_gradients=gradients,
        within=peaks(model, spec, spans, sizes, most_tokens=most, again=again),
        within_built=peaks(model, spec, spans, sizes, most_tokens=most),
    )
