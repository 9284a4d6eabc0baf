"""Layer-wise model parallelism without a pipeline: the baseline that all others improve on."""

from array import array

from megapipe.schedule.generators.registry import register
from megapipe.schedule.generators.slots import by_replica
from megapipe.schedule.ir import Kind, Schedule, pack
from megapipe.schedule.placement import Placement, loop


@register("naive")
def naive(ranks: int, microbatches: int) -> Schedule:
    """One micro-batch after the other; exactly one rank is busy at any time.

    Bubble: (p-1)/p of the makespan for any m and any times. Peak: one micro-batch.
    """
    return one_at_a_time("naive", loop(ranks), (0,) * microbatches)


def one_at_a_time(name: str, placement: Placement, replica: tuple[int, ...]) -> Schedule:
    """Each rank ends a micro-batch before it begins the next; `replica` has one entry for each.

    It can always be executed: the lists are parts of one global order, micro-batch by micro-batch.
    """
    visits = [by_replica(placement, rank) for rank in range(placement.ranks)]
    return Schedule(
        name=name,
        placement=placement,
        microbatches=len(replica),
        ops=tuple(rank_ops(mine, replica) for mine in visits),
        held_limit=tuple(max(len(mine[row]) for row in set(replica)) for mine in visits),
        replica=replica if any(replica) else None,
    )


def rank_ops(stages: list[list[int]], replica: tuple[int, ...]) -> "array[int]":
    """The list of a rank that holds the given stages of each replica (ascending)."""
    ops = array("q")
    for microbatch, row in enumerate(replica):
        ops.extend(pack(Kind.F, stage, microbatch) for stage in stages[row])
        ops.extend(pack(Kind.B, stage, microbatch) for stage in reversed(stages[row]))
    return ops
