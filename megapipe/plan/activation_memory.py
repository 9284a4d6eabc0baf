"""Bytes of activations that a pipeline rank holds while it runs its list of operations."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from megapipe.plan.unit import OPERATIONS, Unit
from megapipe.plan.units import Units
from megapipe.schedule.ir import Kind
from megapipe.schedule.op_types import OpType, op_types


class Activations(NamedTuple):
    """Bytes of activations in device memory and in host memory."""

    device: int
    host: int


def peak_activations(
    units: Units,
    rank: int,
    *,
    inside: bool = True,
    imbalance: Fraction | None = None,
) -> Activations:
    """Return the peak bytes of activations on pipeline rank `rank`, in device and host memory.

    A work item holds the tensors that its stage saves from F to I or B, and those that its weight
    gradients need from I to W. At a recomputed stage it holds only the input until R, I or B builds
    the graph. Memory that an operation takes only while it runs counts unless `inside` is false.
    Messages in flight do not count. `imbalance`: rows of the rank's experts relative to the mean.
    """
    microbatch = units.config.train.microbatch

    @cache
    def changes(what: OpType) -> tuple[Activations, Activations]:
        """Return the bytes at the operation's peak, and at its end, minus those before it."""
        rows = int(what.size * microbatch)
        slices = units.of(what.stage, rows=rows, imbalance=imbalance)
        moments = [*_moments(what, slices, inside=inside)]
        most = Activations(*map(max, zip(*moments, strict=True)))
        return most, moments[-1]

    device = host = most_device = most_host = 0
    for what in op_types(units.layout.run_schedule, rank):
        most, after = changes(what)
        most_device = max(most_device, device + most.device)
        most_host = max(most_host, host + most.host)
        device, host = device + after.device, host + after.host
    assert device == host == 0, "something outlives its W"
    return Activations(most_device, most_host)


def _moments(what: OpType, slices: Sequence[Unit], *, inside: bool) -> Iterator[Activations]:
    """Yield the bytes at points of an operation, minus those before it: at its peak (with
    `inside`), after an I or B has recomputed its stage, and at its end."""
    kind, unit = what.kind, slices[what.slice]
    held = unit.kept if kind == Kind.R or what.rebuilds else unit.held
    before = {Kind.F: 0, Kind.W: unit.queued}.get(kind, held)
    after = {Kind.F: unit.kept, Kind.R: unit.held, Kind.I: unit.queued}.get(kind, 0)
    host_before = unit.host if kind in (Kind.R, Kind.I, Kind.B) else 0
    host_after = unit.host if kind in (Kind.F, Kind.R) else 0
    cached = _cached(what, slices)
    if inside:
        most = unit.peak(OPERATIONS[kind], rebuilt=not what.rebuilds)
        most += cached if kind == Kind.F else 0
        yield Activations(most - before, max(host_before, host_after) - host_before)
    if what.rebuilds:
        yield Activations(unit.held + unit.gradient - before, 0)
    yield Activations(after - before + cached, host_after - host_before)


def _cached(what: OpType, slices: Sequence[Unit]) -> int:
    """Return how many bytes an operation adds to the cache that a micro-batch's slices share."""
    number, last = what.slice, len(slices) - 1
    if what.kind == Kind.F:
        return slices[number].cached[0] - (slices[number - 1].cached[0] if number else 0)
    if what.kind in (Kind.I, Kind.B):
        left = slices[last].cached[0] if number == last else slices[number + 1].cached[1]
        return slices[number].cached[1] - left
    return 0
