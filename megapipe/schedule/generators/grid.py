"""Schedules drawn on a grid of slots: each operation has a slot, each rank's list follows them.

A micro-batch moves by `step` slots from stage to stage, forward and backward, and nothing else
needs to be known: if slots rise along the way of every micro-batch, and no rank has two operations
in one slot, the lists can always be executed, in whatever time the operations take. Leaving
micro-batches out of such a grid leaves a valid one.
"""

from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import JOINED, Kind, Schedule, pack, packed
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import Placement, mirrored


class MicroBatchPath(NamedTuple):
    """The way of one micro-batch through the grid."""

    direction: int
    forward: int
    """Slot of its F at stage 0; that at stage s is s * step later."""
    backward: int
    """Slot of its B at stage 0; that at stage s is s * step earlier."""


def on_grid(
    name: str,
    placement: Placement,
    trips: Sequence[MicroBatchPath],
    *,
    step: int = 1,
    sizes: tuple[Fraction, ...] | None = None,
) -> Schedule:
    """The schedule of micro-batches 0, 1, .. that make the given trips."""
    ops = tuple(rank_ops(rank, placement, trips, step) for rank in range(placement.ranks))
    return Schedule(
        name=name,
        placement=placement,
        microbatches=len(trips),
        ops=ops,
        activation_bound=tuple(map(most_held, ops)),
        direction=tuple(trip.direction for trip in trips) if len(placement.table) > 1 else None,
        sizes=sizes,
    )


def rank_ops(
    rank: int, placement: Placement, trips: Sequence[MicroBatchPath], step: int
) -> "array[int]":
    """The list of one rank. Operations in one slot run as one."""
    mine = by_direction(placement, rank)
    cells: list[tuple[int, int]] = []
    for microbatch, trip in enumerate(trips):
        for stage in mine[trip.direction]:
            away = stage * step
            cells.append((trip.forward + away, pack(Kind.F, stage, microbatch)))
            cells.append((trip.backward - away, pack(Kind.B, stage, microbatch)))
    cells.sort()
    ops = packed(code for _, code in cells)
    for index in range(len(cells) - 1):
        if cells[index][0] == cells[index + 1][0]:
            ops[index] |= JOINED
    return ops


def by_direction(placement: Placement, rank: int) -> list[list[int]]:
    """The stages of a rank in each direction, ascending."""
    return [[stage for stage, at in enumerate(row) if at == rank] for row in placement.table]


def both_ways(name: str, placement: Placement, pairs: int = 1) -> Placement:
    """`pairs` copies of a placement, each moved on by ranks / pairs, and the mirror of each.

    Every rank gets 2 * pairs times its chunks, all of different stages.

    Raises:
        ScheduleError: ranks that are not a multiple of 2 * pairs, where stages would meet
            themselves on a rank.
    """
    ranks, needed = placement.ranks, 2 * pairs
    if ranks % needed:
        raise ScheduleError(
            f"schedule {name}: ranks must be a multiple of {needed}, not {ranks}; "
            f"the next is {-(-ranks // needed) * needed}"
        )
    return mirrored(
        Placement(
            ranks,
            tuple(
                tuple((rank + pair * ranks // pairs) % ranks for rank in row)
                for row in placement.table
                for pair in range(pairs)
            ),
        )
    )
