"""Segments of operations, one per layer: three equal layers are measured for any number.

A new segment of an operation begins at the first use of another layer's weight. Segments of equal
layers are equal, except for the first and the last of these layers, which have other neighbours. So
of many equal layers in a row three are measured, and the middle one counts for the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from megapipe.layers.activation_policy import BlockSpan
from megapipe.layout.layout import Layout
from megapipe.model.partition import StageSpec
from megapipe.plan.unit import Kernel, Operation, Transfer, Unit

KEPT = 3
"""Number of measured repetitions of a layer pattern that repeats more often."""
LONGEST = 8
"""Maximum number of layers in a repeating pattern; layers recomputed together count as one."""


class Segment(BaseModel):
    """The part of an operation between the first uses of two layers' weights."""

    model_config = ConfigDict(frozen=True)

    layer: int | None
    """Layer whose weight begins the segment; None for the segment before any weight."""
    peak: int
    """Peak bytes on the device minus the bytes when the segment begins."""
    device: int
    """Bytes on the device when the segment ends minus the bytes when it begins."""
    host: int
    """Bytes in host memory when the segment ends minus the bytes when it begins."""
    cached: int
    """Part of `device` in the cache that a micro-batch's slices share."""
    calls: tuple[Kernel | Transfer, ...]


class Slice(BaseModel):
    """Segments of all operations on one slice of the sequences, or on whole sequences."""

    model_config = ConfigDict(frozen=True)

    passes: Mapping[Operation, tuple[Segment, ...]]
    """Segments by operation."""
    gradient: int
    """Bytes of the gradient that the backward receives."""


class Measured(BaseModel):
    """Segments of some layers of a model, by slice."""

    model_config = ConfigDict(frozen=True)

    slices: tuple[Slice, ...]
    compiled: bool
    """Whether a run compiles the blocks; they are measured uncompiled."""


_Passes = Mapping[Operation, Sequence[Segment]]


class Part(NamedTuple):
    """Consecutive layers of the model within one stage."""

    spec: StageSpec
    spans: Sequence[BlockSpan]
    recompute: bool
    """Whether the stage is recomputed as a whole."""


def part_of(layout: Layout, stage: int) -> Part:
    """Return the layers of a stage with their recomputation."""
    spec, spans = layout.stage_layers[stage], layout.block_policies[stage]
    return Part(spec, spans, stage in layout.schedule.recompute)


class Short(NamedTuple):
    """A part of a model in which more than three equal layers in a row are replaced by three."""

    part: Part
    repeats: tuple[tuple[range, int], ...]
    """Ranges of layers in `part`, each with the number of times that it counts."""

    def expand(self, segments: Sequence[Segment]) -> Iterator[Segment]:
        """Yield the segments of the original part, from `segments` of the shortened one."""
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
    """A single layer, or several layers that are recomputed together."""

    kinds: tuple[Hashable, ...]
    span: BlockSpan


def shortened(part: Part, kinds: Sequence[Hashable]) -> Short:
    """Shorten a part of a model; layers are equal if their `kinds` are. The shortened part consists
    of the first layers of the model with the same sequence of kinds."""
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
    """Find the pattern, from the first layer on, whose repetitions cover the most layers. Return
    its length and the number of repetitions."""

    def times(period: int) -> int:
        count = 1
        while own[count * period : (count + 1) * period] == own[:period]:
            count += 1
        return count

    counted = [(period, times(period)) for period in range(1, min(LONGEST, len(own)) + 1)]
    most = max(period * count for period, count in counted if count > KEPT or period == 1)
    return next(each for each in counted if each[0] * each[1] == most)


def _spans(kept: Sequence[_Together]) -> tuple[BlockSpan, ...]:
    """Join neighbouring layers of the same policy, unless they are recomputed together."""
    spans: list[BlockSpan] = []
    for each in kept:
        policy = each.span.policy
        if spans and spans[-1].policy == policy and "block" not in policy.recompute:
            spans[-1] = BlockSpan(spans[-1].blocks + each.span.blocks, policy)
        else:
            spans.append(each.span)
    return tuple(spans)


def units_of(measured: Measured, short: Short) -> list[Unit]:
    """Sum the segments of each slice to costs of the original part."""
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
    """Sum up one slice, without routing statistics and losses, which stay until the step ends."""
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
