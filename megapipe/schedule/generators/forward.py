"""Forward passes alone, for validation and inference."""

from array import array
from collections.abc import Sequence

from megapipe.schedule.generators.grid import by_direction
from megapipe.schedule.ir import Kind, Schedule, packed, span
from megapipe.schedule.placement import Placement


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """Run one forward per stage and micro-batch, through direction 0 of any placement.

    With at most v chunks on a rank, a micro-batch enters every v time slots and moves on by one
    stage per slot. Each rank runs its operations in the order of their slots; in one slot, earlier
    stages come first. A micro-batch reaches stage s+1 in a later slot than stage s, so the order
    can always be executed. With one chunk per rank and on the V it is as fast as possible; a loop
    of v chunks takes up to (v-1)(p-1) slots more. The number of messages in flight does not grow
    with m, and no activation is saved.
    """
    chunks = [by_direction(placement, rank)[0] for rank in range(placement.ranks)]
    period = max(map(len, chunks))
    return Schedule(
        name="forward_only",
        placement=placement,
        microbatches=microbatches,
        ops=tuple(rank_ops(stages, period, microbatches) for stages in chunks),
        activation_bound=(0,) * placement.ranks,
        forward_only=True,
    )


def rank_ops(stages: Sequence[int], period: int, microbatches: int) -> "array[int]":
    """Return the forwards of a rank that has `stages`, in order, if a micro-batch enters the
    pipeline every `period` time slots."""
    slots = [
        (period * microbatch + stage, stage, code)
        for stage in stages
        for microbatch, code in enumerate(span(Kind.F, stage, 0, microbatches))
    ]
    return packed(code for _, _, code in sorted(slots))
