"""Forward passes alone, for validation and inference."""

from array import array
from collections.abc import Sequence

from megapipe.schedule.generators.grid import by_direction
from megapipe.schedule.ir import Kind, Schedule, packed, span
from megapipe.schedule.placement import Placement


def forward_only(placement: Placement, microbatches: int) -> Schedule:
    """One forward per stage and micro-batch, through direction 0 of any placement.

    A micro-batch enters every v slots (v: most chunks on a rank) and moves on by one stage per
    slot; each rank runs its operations in the order of their slots, earlier stages first. As a
    micro-batch reaches stage s+1 in a later slot than stage s, the order can always be executed.
    One chunk and the V are as fast as can be, a loop of v chunks takes up to (v-1)(p-1) slots
    more, and the number of messages under way does not grow with m. Nothing is held for a backward.
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
    """The list of a rank that holds the given stages, a micro-batch entering every period slots."""
    slots = [
        (period * microbatch + stage, stage, code)
        for stage in stages
        for microbatch, code in enumerate(span(Kind.F, stage, 0, microbatches))
    ]
    return packed(code for _, _, code in sorted(slots))
