"""Operations of a stage by its layers: what is measured of three equal layers tells that of many.

An operation is cut where it first takes a weight of another layer. Between two such cuts the same
happens for equal layers, but for the first and the last of them, beside which something else is.
So a stage is measured with three layers of a kind in a row, and the middle one stands for the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from megapipe.layers.policy import BlockSpan
from megapipe.layout.layout import Layout
from megapipe.model.partition import StageSpec
from megapipe.plan.unit import Kernel, Operation, Transfer, Unit

KEPT = 3
"""Periods that are measured where there are more."""
LONGEST = 8
"""Most layers, or spans that rerun together, of a pattern that is found to repeat."""


class Segment(BaseModel):
    """Changes and calls until an operation first takes a weight of another layer."""

    model_config = ConfigDict(frozen=True)

    layer: int | None
    """The layer whose weight was taken first; None before any."""
    peak: int
    """The most bytes on the device above those at its begin."""
    device: int
    """Change of the bytes on the device, up to its end."""
    host: int
    """The same of bytes in host memory."""
    cached: int
    """The part of `device` that a micro-batch's slices share."""
    calls: tuple[Kernel | Transfer, ...]


class Slice(BaseModel):
    """Segments of one slice of sequences, or of whole ones."""

    model_config = ConfigDict(frozen=True)

    passes: Mapping[Operation, tuple[Segment, ...]]
    """Segments of each operation."""
    gradient: int
    """Bytes of the gradient that it receives."""


class Measured(BaseModel):
    """Segments of all slices of a part of a model."""

    model_config = ConfigDict(frozen=True)

    slices: tuple[Slice, ...]
    compiled: bool
    """A run compiles its blocks, which are measured without."""


_Passes = Mapping[Operation, Sequence[Segment]]


class Part(NamedTuple):
    """Some units of the model that one stage has."""

    spec: StageSpec
    spans: Sequence[BlockSpan]
    recompute: bool
    """The stage is recomputed as a whole."""


def part_of(layout: Layout, stage: int) -> Part:
    """Return the units of the model that a stage of a layout has."""
    spec, spans = layout.stage_layers[stage], layout.block_policies[stage]
    return Part(spec, spans, stage in layout.schedule.recompute)


class Short(NamedTuple):
    """A part with at most three equal layers in a row, and what stands for more."""

    part: Part
    repeats: tuple[tuple[range, int], ...]
    """Layers of `part`, and how often they are there in the place of once."""

    def expand(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """Yield the segments of the part that this one stands for."""
        start = 0
        while start < len(segments):
            layer = segments[start].layer
            layers, times = next((r for r in self.repeats if layer in r[0]), (range(0), 1))
            stop = start + 1
            while stop < len(segments) and segments[stop].layer in layers:
                stop += 1
            for _ in range(times):
                yield from segments[start:stop]
            start = stop


class _Together(NamedTuple):
    """Layers that are measured as one: a single one, or those that rerun together."""

    kinds: tuple[Hashable, ...]
    span: BlockSpan


def shortened(part: Part, kinds: Sequence[Hashable]) -> Short:
    """Shorten a part of a model, `kinds` of whose layers are equal where these are alike, and take
    the first layers of the model that are like its own."""
    own = list(_together(part, kinds))
    kept, repeats, start = list[_Together](), list[tuple[range, int]](), 0
    while start < len(own):
        period, count = _repetition(own[start:])
        begin = sum(len(each.kinds) for each in kept)
        size = sum(len(each.kinds) for each in own[start : start + period])
        if count > KEPT:
            middle = begin + (KEPT // 2) * size
            repeats.append((range(middle, middle + size), count - KEPT + 1))
        kept += own[start : start + period * min(count, KEPT)]
        start += period * count
    wanted = tuple(kind for each in kept for kind in each.kinds)
    found = (
        first
        for first in range(len(kinds) - len(wanted) + 1)
        if tuple(kinds[first : first + len(wanted)]) == wanted
    )
    first = next(found, None)
    if first is None:
        return Short(part, ())
    layers = range(first, first + len(wanted))
    shorter = part._replace(spec=replace(part.spec, layers=layers), spans=_spans(kept))
    moved = ((range(first + of.start, first + of.stop), times) for of, times in repeats)
    return Short(shorter, tuple(moved))


def _together(part: Part, kinds: Sequence[Hashable]) -> Iterator[_Together]:
    start = part.spec.layers.start
    for blocks, policy in part.spans:
        step = blocks if "block" in policy.recompute else 1
        for _ in range(0, blocks, step):
            yield _Together(tuple(kinds[start : start + step]), BlockSpan(step, policy))
            start += step


def _repetition(own: Sequence[_Together]) -> tuple[int, int]:
    """Find how many make a pattern, and how often that comes in a row: most of them all."""

    def times(period: int) -> int:
        count = 1
        while own[count * period : (count + 1) * period] == own[:period]:
            count += 1
        return count

    counted = [(period, times(period)) for period in range(1, min(LONGEST, len(own)) + 1)]
    most = max(period * count for period, count in counted if count > KEPT or period == 1)
    return next(each for each in counted if each[0] * each[1] == most)


def _spans(kept: Sequence[_Together]) -> tuple[BlockSpan, ...]:
    """Join neighbours that do not rerun together."""
    spans: list[BlockSpan] = []
    for each in kept:
        policy = each.span.policy
        if spans and spans[-1].policy == policy and "block" not in policy.recompute:
            spans[-1] = BlockSpan(spans[-1].blocks + each.span.blocks, policy)
        else:
            spans.append(each.span)
    return tuple(spans)


def units_of(measured: Measured, short: Short) -> list[Unit]:
    """Add up the segments of each slice of a part."""
    whole = [
        {what: tuple(short.expand(segments)) for what, segments in each.passes.items()}
        for each in measured.slices
    ]
    gradients = [each.gradient for each in measured.slices]
    cached = list(accumulate(_sum(passes["F"], "cached") for passes in whole))
    freed = accumulate((_sum(passes["I"], "cached") for passes in whole[:0:-1]), initial=0)
    after = [0, *(cached[-1] + change for change in [*freed][:0:-1])]
    both = zip(cached, after, strict=True)
    units = (_unit(*each) for each in zip(whole, gradients, both, strict=True))
    return [unit.model_copy(update={"compiled": measured.compiled}) for unit in units]


def _unit(passes: _Passes, gradient: int, cached: tuple[int, int]) -> Unit:
    """Make a unit without what stays after W until the step ends: figures of routing, losses."""
    kept = _sum(passes["F"], "device") - _sum(passes["F"], "cached")
    held = kept + _sum(passes.get("R", ()), "device")
    queued = held + _sum(passes["I"], "device") - _sum(passes["I"], "cached")
    left = queued + _sum(passes["W"], "device")
    begun = {"F": -_sum(passes["F"], "cached"), "R": kept, "I": held, "W": queued, "B": held}
    return Unit(
        held=held - left,
        host=_sum(passes["F"], "host"),
        queued=queued - left,
        kept=kept - left,
        cached=cached,
        gradient=gradient,
        peaks={what: begun[what] + _peak(of) - left for what, of in passes.items()},
        operations={
            what: tuple(call for each in of for call in each.calls) for what, of in passes.items()
        },
    )


def _sum(segments: Sequence[Segment], what: str) -> int:
    return sum(getattr(each, what) for each in segments)


def _peak(segments: Sequence[Segment]) -> int:
    begins = accumulate((each.device for each in segments), initial=0)
    return max(begin + each.peak for begin, each in zip(begins, segments, strict=False))
