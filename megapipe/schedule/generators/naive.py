"""Layer-wise model parallelism without a pipeline: the baseline of all other schedules."""

from array import array

from megapipe.schedule.generators.grid import by_direction
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, pack
from megapipe.schedule.placement import Placement, loop


@register("naive")
def naive(ranks: int, microbatches: int) -> Schedule:
    """Run one micro-batch after the other; exactly one rank is busy at any time.

    Bubble: (p-1)/p of the makespan for any m and any times. Peak: one micro-batch.
    """
    return one_at_a_time("naive", loop(ranks), (0,) * microbatches)


def one_at_a_time(name: str, placement: Placement, direction: tuple[int, ...]) -> Schedule:
    """Build a schedule in which each rank ends a micro-batch before it begins the next one.

    `direction` has the direction of each micro-batch. The schedule can always be executed: the
    lists of the ranks are subsequences of one global order, micro-batch by micro-batch.
    """
    visits = [by_direction(placement, rank) for rank in range(placement.ranks)]
    return Schedule(
        name=name,
        placement=placement,
        microbatches=len(direction),
        ops=tuple(rank_ops(mine, direction) for mine in visits),
        activation_bound=tuple(max(len(mine[row]) for row in set(direction)) for mine in visits),
        direction=direction if any(direction) else None,
    )


def rank_ops(stages: list[list[int]], direction: tuple[int, ...]) -> "array[int]":
    """Return the operations of one rank. `stages` has the rank's stages (ascending) in each
    direction, and `direction` the direction of each micro-batch."""
    ops = array("q")
    for microbatch, row in enumerate(direction):
        ops.extend(pack(Kind.F, stage, microbatch) for stage in stages[row])
        ops.extend(pack(Kind.B, stage, microbatch) for stage in reversed(stages[row]))
    return ops
