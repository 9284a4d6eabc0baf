"""GPipe (Huang et al., 1811.06965): all forwards, then all backwards."""

from array import array

from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import Placement, loop


@register("gpipe")
def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards, on the loop placement.

    The backwards run in micro-batch order (the paper reverses it). Bubble: (p-1)/(m+p-1) of the
    makespan; with v chunks this is the breadth-first order (Lamy-Poirier, 2211.05953), and the
    idle time is divided by v where m >= p. Peak: all m micro-batches.
    """
    return gpipe_on(loop(ranks, chunks), microbatches)


def gpipe_on(placement: Placement, microbatches: int) -> Schedule:
    """All forwards, then all backwards, on any placement with one replica.

    It is the plain reference for every schedule on that placement. Each rank's list is a part of
    one global order (forwards by stage, then backwards by descending stage, each by micro-batch)
    in which no operation comes before its inputs, so it can always be executed.
    """
    return Schedule(
        name="gpipe",
        placement=placement,
        microbatches=microbatches,
        ops=tuple(
            rank_ops(placement.stages_of(rank), microbatches) for rank in range(placement.ranks)
        ),
        held_limit=tuple(
            len(placement.stages_of(rank)) * microbatches for rank in range(placement.ranks)
        ),
    )


def rank_ops(stages: tuple[int, ...], microbatches: int) -> "array[int]":
    """The list of a rank that holds the given stages (ascending)."""
    ops = array("q")
    for stage in stages:
        ops.extend(span(Kind.F, stage, 0, microbatches))
    for stage in reversed(stages):
        ops.extend(span(Kind.B, stage, 0, microbatches))
    return ops
