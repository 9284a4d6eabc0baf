"""Schedules on a grid of time slots: each rank runs its operations in the order of their slots.

A micro-batch takes `step` slots from stage to stage, forward and backward. So the slots of its F
and of its B at stage 0 define the slots of all its operations. If slots rise along the path of
every micro-batch, and no rank has two operations in one slot, the schedule can always be executed,
however long operations take. Some micro-batches of a grid may be omitted.
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
    """The path of one micro-batch through the grid."""

    direction: int
    forward: int
    """Time slot of the F at stage 0; the F at stage s is s * step slots later."""
    backward: int
    """Time slot of the B at stage 0; the B at stage s is s * step slots earlier."""


def on_grid(
    name: str,
    placement: Placement,
    paths: Sequence[MicroBatchPath],
    *,
    step: int = 1,
    sizes: tuple[Fraction, ...] | None = None,
) -> Schedule:
    """Build the schedule in which micro-batches 0, 1, .. take the given paths.

    `step` is the number of time slots from stage to stage. `sizes` has the meaning of
    :attr:`Schedule.sizes <megapipe.schedule.ir.Schedule.sizes>`.
    """
    ops = tuple(rank_ops(rank, placement, paths, step) for rank in range(placement.ranks))
    return Schedule(
        name=name,
        placement=placement,
        microbatches=len(paths),
        ops=ops,
        activation_bound=tuple(map(most_held, ops)),
        direction=tuple(path.direction for path in paths) if len(placement.table) > 1 else None,
        sizes=sizes,
    )


def rank_ops(
    rank: int, placement: Placement, paths: Sequence[MicroBatchPath], step: int
) -> "array[int]":
    """Return the operations of one rank, sorted by time slot. Two operations in the same slot are
    joined: they run as one."""
    mine = by_direction(placement, rank)
    cells: list[tuple[int, int]] = []
    for microbatch, path in enumerate(paths):
        for stage in mine[path.direction]:
            away = stage * step
            cells.append((path.forward + away, pack(Kind.F, stage, microbatch)))
            cells.append((path.backward - away, pack(Kind.B, stage, microbatch)))
    cells.sort()
    ops = packed(code for _, code in cells)
    for index in range(len(cells) - 1):
        if cells[index][0] == cells[index + 1][0]:
            ops[index] |= JOINED
    return ops


def by_direction(placement: Placement, rank: int) -> list[list[int]]:
    """Return the stages of a rank in each direction, ascending."""
    return [[stage for stage, at in enumerate(row) if at == rank] for row in placement.table]


def bidirectional(name: str, placement: Placement, pairs: int = 1) -> Placement:
    """Repeat a placement `pairs` times, each time shifted by ranks / pairs ranks, and add the
    mirror image of every repetition (rank r becomes ranks-1-r).

    Every rank gets 2 * pairs times as many chunks, all of different stages.

    Raises:
        ScheduleError: the number of ranks is not a multiple of 2 * pairs, so that a rank would have
            a stage twice.
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
