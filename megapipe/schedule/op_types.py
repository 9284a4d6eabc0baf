"""Types of operations: operations of a rank that differ only in their micro-batch share a type."""

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
    """Properties that operations share if they differ only in their micro-batch."""

    kind: Kind
    stage: int
    slice: int
    size: Fraction | int
    """Size of the micro-batch as a fraction of a whole one; 1 if no micro-batch is split."""
    rebuilds: bool
    """Whether the operation, an I or B, recomputes the forward first: the list has no R for it."""


def op_types(schedule: Schedule, rank: int) -> Iterator[OpType]:
    """Yield the type of each operation in a rank's list, in order; updates (U) are skipped."""
    codes, recompute, sizes = schedule.ops[rank], schedule.recompute, schedule.sizes
    alike, item_mask = ~(MICROBATCH_MASK << MICROBATCH_SHIFT | JOINED), ~(KIND_MASK | JOINED)
    built = {code & item_mask for code in codes if code & KIND_MASK == Kind.R}
    found: dict[tuple[int, Fraction | int, bool], OpType] = {}
    for code in codes:
        kind = code & KIND_MASK
        if kind == Kind.U:
            continue
        rebuilds = (
            bool(recompute)
            and kind in (Kind.I, Kind.B)
            and code >> STAGE_SHIFT & STAGE_MASK in recompute
            and code & item_mask not in built
        )
        size = sizes[code >> MICROBATCH_SHIFT & MICROBATCH_MASK] if sizes else 1
        key = code & alike, size, rebuilds
        if key not in found:
            op = unpack(code)
            found[key] = OpType(op.kind, op.stage, op.slice, size, rebuilds)
        yield found[key]
