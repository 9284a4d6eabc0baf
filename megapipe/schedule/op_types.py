"""Operations of a rank by what they do, whichever micro-batch they are of: few types for many."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from megapipe.schedule.ir import (
    JOINED,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    Kind,
    Schedule,
    unpack,
)


class OpType(NamedTuple):
    """An operation without its micro-batch."""

    kind: Kind
    stage: int
    slice: int
    size: Fraction | int
    """Share of a whole micro-batch's rows."""
    rebuilds: bool
    """Whether it is an I or B that runs the forward of its stage again, which no R has done."""


def op_types(schedule: Schedule, rank: int) -> Iterator[OpType]:
    """Yield the types of a rank's operations in their order, but for updates."""
    codes, recompute, sizes = schedule.ops[rank], schedule.recompute, schedule.sizes
    alike, piece = ~(MICROBATCH_MASK << MICROBATCH_SHIFT | JOINED), ~(KIND_MASK | JOINED)
    built = {code & piece for code in codes if code & KIND_MASK == Kind.R}
    found: dict[tuple[int, Fraction | int, bool], OpType] = {}
    for code in codes:
        kind = code & KIND_MASK
        if kind == Kind.U:
            continue
        rebuilds = (
            bool(recompute)
            and kind in (Kind.I, Kind.B)
            and code >> STAGE_SHIFT & STAGE_MASK in recompute
            and code & piece not in built
        )
        size = sizes[code >> MICROBATCH_SHIFT & MICROBATCH_MASK] if sizes else 1
        key = code & alike, size, rebuilds
        if key not in found:
            op = unpack(code)
            found[key] = OpType(op.kind, op.stage, op.slice, size, rebuilds)
        yield found[key]
