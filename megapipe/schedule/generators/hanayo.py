r"""Hanayo (Liu et al., 2308.15762): waves over the ranks, without replicas of the weights.

The placement goes down and up the ranks once per wave. So there are v = 2 * waves chunks per rank,
S = v p stages, and no message where a wave turns. The paper fixes the placement and lets each rank
prefer backwards; the order of this module is a closed form of the paper's. Time is cut into grid
cells, each long enough for one F and one B. Micro-batch i = u*p + k runs F at stage s in cell t + s
and B in cell t + 2(S-1) - s, with

    t = u S + 2 k

so a micro-batch moves by one stage per cell. Let c = 0, 2, .. v-2. On rank r, chunk c is stage c p
+ r and chunk c + 1 is stage (c+2) p - 1 - r. So forwards of chunks c lie in cells u S + c p + r + 2
k, and forwards of chunks c + 1 in cells u S + (c+2) p - 1 - r + 2 k. Over all c, u and k < p, each
of these two sets contains every second cell exactly once. The sets have no cell in common, as r and
-1-r differ in parity. The cells of backwards are the mirror image. So no cell of the steady state
is empty, whatever the times are: a rank's list begins with the forwards whose cells come before its
first backward, then forwards and backwards alternate.
"""

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.grid import MicroBatchPath, on_grid
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, wave


@register("hanayo")
def hanayo(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Run a wave pipeline with 2, 4, .. chunks per rank: one wave per two chunks.

    Micro-batches run in units of p; the last unit has n. F and B are the times of 1/p of the model,
    w is the number of waves. Idle time for m >= p: ((n-1)/w + p-n) max(F,B), that is (p-1)
    max(F,B) / w if p divides m. For F = B this is the idle time of the interleaved schedule. The
    bubble quoted for B = 2F at m = p, (2p-2)/(3pw+p-1), is wrong; correct is (2p-2)/(3pw+2p-2).
    Peak: at most p micro-batches. Any m and any p.

    Raises:
        ScheduleError: an odd number of chunks.
    """
    return in_waves("hanayo", wave(ranks, waves_of("hanayo", chunks)), microbatches)


def in_waves(name: str, placement: Placement, microbatches: int) -> Schedule:
    """Build Hanayo's order (see the module) on a wave placement; micro-batches take turns between
    the directions of the placement."""
    ranks, stages, directions = placement.ranks, placement.stages, len(placement.table)
    paths = []
    for microbatch in range(microbatches):
        unit, index = divmod(microbatch, ranks)
        cell = unit * stages + 2 * (index // directions)
        paths.append(
            MicroBatchPath(
                direction=microbatch % directions,
                forward=2 * cell,
                backward=2 * (cell + 2 * (stages - 1)) + 1,
            )
        )
    return on_grid(name, placement, paths, step=2)


def waves_of(name: str, chunks: int) -> int:
    """Return the number of waves for `chunks` chunks per rank. Odd `chunks` raise ScheduleError."""
    if chunks % 2:
        raise ScheduleError(
            f"schedule {name}: chunks must be even, two per wave, not {chunks}; "
            f"the next is {chunks + 1}"
        )
    return chunks // 2
