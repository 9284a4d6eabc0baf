"""1F1B: one forward, one backward (PipeDream-Flush, 2006.09503; DAPPLE, 2007.01045)."""

from array import array

from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import loop


@register("1f1b")
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Warm up with just enough forwards, then alternate.

    Bubble: (p-1)/(m+p-1) of the makespan, as GPipe. Peak on rank r: min(p-r, m) micro-batches.
    """
    return Schedule(
        name="1f1b",
        placement=loop(ranks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, ranks, microbatches) for rank in range(ranks)),
        held_limit=tuple(min(ranks - rank, microbatches) for rank in range(ranks)),
    )


def rank_ops(rank: int, ranks: int, microbatches: int) -> "array[int]":
    """The list of one rank: min(p-1-r, m) forwards, pairs of forward and backward, the rest."""
    warmup = min(ranks - 1 - rank, microbatches)
    forwards = array("q", span(Kind.F, rank, 0, microbatches))
    backwards = array("q", span(Kind.B, rank, 0, microbatches))
    ops = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        ops.append(forward)
        ops.append(backward)
    ops.extend(backwards[microbatches - warmup :])
    return ops
