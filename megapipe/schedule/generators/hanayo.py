r"""Hanayo (Liu et al., 2308.15762): waves over the ranks, without copies of the weights.

The placement goes down and up the ranks once per wave, so v = 2 * waves chunks per rank and the
turns cost no message. The paper fixes the placement and lets each rank prefer backwards; the order
here is a closed form of that. Time is cut in grid cells that have room for one F and one B each.
Micro-batch i = u*p + k runs F at stage s in cell t + s and B in cell t + 2(S-1) - s, with

    t = u S + 2 k

so it moves by one stage per cell. On rank r, chunk c (even) is stage c p + r and chunk c + 1 is
stage (c+2) p - 1 - r. The forwards of the first kind lie in cells u S + c p + r + 2 k, those of
the second in cells u S + (c+2) p - 1 - r + 2 k. For each kind, c (0, 2, .. v-2), u and k < p give
every second cell exactly once; the kinds do not meet as r and -1-r differ in parity; and B is the
mirror image. So in between no cell is left open, whatever the times are: a list begins with the
forwards whose cells come before its first backward, then the two alternate.
"""

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.grid import MicroBatchPath, on_grid
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, wave


@register("hanayo")
def hanayo(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Wave pipeline with 2, 4, .. chunks per rank: one wave per two chunks.

    Idle time, with w waves, F and B those of a full rank, and n micro-batches in the last unit of
    at most p: ((n-1)/w + p-n) max(F,B) for m >= p, that is (p-1) max(F,B) / w where p divides m.
    For F = B this is that of the interleaved schedule. The ratio quoted for B = 2F at m = p,
    (2p-2)/(3pw+p-1), does not hold: it is (2p-2)/(3pw+2p-2). Peak: at most p micro-batches. Any
    m and any p.

    Raises:
        ScheduleError: an odd number of chunks.
    """
    return in_waves("hanayo", wave(ranks, waves_of("hanayo", chunks)), microbatches)


def in_waves(name: str, placement: Placement, microbatches: int) -> Schedule:
    """The order above; micro-batches take turns between the directions of the placement."""
    ranks, stages, directions = placement.ranks, placement.stages, len(placement.table)
    trips = []
    for microbatch in range(microbatches):
        unit, place = divmod(microbatch, ranks)
        cell = unit * stages + 2 * (place // directions)
        trips.append(
            MicroBatchPath(
                direction=microbatch % directions,
                forward=2 * cell,
                backward=2 * (cell + 2 * (stages - 1)) + 1,
            )
        )
    return on_grid(name, placement, trips, step=2)


def waves_of(name: str, chunks: int) -> int:
    """Waves that make so many chunks per rank; ScheduleError for an odd number."""
    if chunks % 2:
        raise ScheduleError(
            f"schedule {name}: chunks must be even, two per wave, not {chunks}; "
            f"the next is {chunks + 1}"
        )
    return chunks // 2
