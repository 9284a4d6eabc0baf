"""Bytes of activations that a pipeline rank holds while it runs its list of operations."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from megapipe.plan.unit import OPERATIONS, Unit
from megapipe.plan.units import Units
from megapipe.schedule.ir import Kind, Op

_Owner = tuple[int, int, int | None]
"""(stage, micro-batch, slice); without a slice the cache, which the slices share."""


class Activations(NamedTuple):
    """Bytes in the memory of the device and of the host."""

    device: int
    host: int


_NOTHING = Activations(0, 0)


def peak_activations(
    units: Units,
    rank: int,
    *,
    inside: bool = True,
    imbalance: Fraction | None = None,
) -> Activations:
    """The most that pipeline rank `rank` holds for its pieces, in either memory.

    A piece holds the tensors that its stage saves from F to I or B, and those that its weight
    gradients need from I to W. At a recomputed stage it holds the input alone until R, I or B
    builds the graph. While an operation runs its piece takes more; without `inside` only the
    moments between operations count. Messages in transit are left out. The experts of a rank get
    so many times the mean rows of a rank as `imbalance` says, in all layers and pieces; without it
    as many as their capacity allows, or the mean.
    """
    held: dict[_Owner, Activations] = {}
    device = host = most_device = most_host = 0
    for changes in _moments(units, rank, inside, imbalance):
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
    units: Units, rank: int, inside: bool, imbalance: Fraction | None
) -> Iterator[dict[_Owner, Activations]]:
    """Changes of the bytes held: after each operation, and where an I or B recomputes its stage.

    With `inside` also at the fullest moment of each operation.
    """
    schedule, train = units.layout.listed, units.config.train
    rows = [int(schedule.size_of(i) * train.microbatch) for i in range(schedule.microbatches)]
    built: set[_Owner] = set()
    """Graphs of stages that are run again, ahead of the backward."""
    for op in schedule.rank_ops(rank):
        if op.kind == Kind.U:
            continue
        unit = units.of(op.stage, rows=rows[op.microbatch], imbalance=imbalance)[op.slice]
        owner = op.stage, op.microbatch, op.slice
        again = op.stage in schedule.recompute and owner not in built
        if inside:
            host = unit.host if op.kind in (Kind.F, Kind.B, Kind.I) else 0
            after = _cache(op, unit) if op.kind == Kind.F else {}
            most = unit.peak(OPERATIONS[op.kind], rebuilt=not again)
            yield {owner: Activations(most, host), **after}
        if op.kind == Kind.F:
            yield {owner: Activations(unit.kept, unit.host), **_cache(op, unit)}
        elif op.kind == Kind.R:
            built.add(owner)
            yield {owner: Activations(unit.held, unit.host)}
        elif op.kind in (Kind.B, Kind.I):
            if again:
                yield {owner: Activations(unit.held + unit.gradient, unit.host)}
            left = Activations(unit.queued, 0) if op.kind == Kind.I else _NOTHING
            yield {owner: left, **_cache(op, unit)}
        else:
            yield {owner: _NOTHING}


def _cache(op: Op, unit: Unit) -> dict[_Owner, Activations]:
    """Bytes of the micro-batch's cache after an F, I or B."""
    size = unit.cached[0 if op.kind == Kind.F else 1]
    return {(op.stage, op.microbatch, None): Activations(size, 0)} if any(unit.cached) else {}
