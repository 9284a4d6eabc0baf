"""AutoPipe's micro-batch slicer: halves at the start, so that the last stage begins sooner."""

from array import array
from fractions import Fraction

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import loop


@register("autopipe")
def autopipe(ranks: int, microbatches: int, cost: Cost | None = None) -> Schedule:
    """1F1B whose first n micro-batches go in two halves of their rows (Liu et al., CLUSTER 2022).

    The order is that of 1F1B, the halves of a micro-batch one after the other. The last stage
    begins after (p-1) F/2 instead of (p-1) F, and the makespan is shorter by as much. Peak: that of
    1F1B, min(p-r, m) micro-batches on rank r.

    The paper solves for the number to cut. Here it is the fewest with which the last stage, once it
    has begun, never waits: micro-batch n, the first whole one, arrives there n F + (p-1) F after
    the start and is due n (F+B) + (p-1) F/2 after it, so n is ceil((p-1) F / 2B), or m if that is
    less.

    Args:
        cost: times of F and B; default F = 1, B = 2. Where they differ by stage, the forwards of
            all stages but the last count, and the backward of the last.
    """
    forward, backward, *_ = (cost or Cost()).table(ranks)
    lead = sum(forward[:-1])
    enough = (n for n in range(microbatches) if 2 * n * backward[-1] >= lead)
    halved = next(enough, microbatches)
    half, whole = Fraction(1, 2), Fraction(1)
    return Schedule(
        name="autopipe",
        placement=loop(ranks),
        microbatches=microbatches + halved,
        ops=tuple(rank_ops(rank, ranks, microbatches, halved) for rank in range(ranks)),
        activation_bound=tuple(
            held + min(halved, held)
            for held in (min(ranks - r, microbatches) for r in range(ranks))
        ),
        sizes=(half,) * (2 * halved) + (whole,) * (microbatches - halved),
    )


def rank_ops(rank: int, ranks: int, microbatches: int, halved: int) -> "array[int]":
    """The list of one rank: 1F1B over whole micro-batches, of which the first `halved` are two."""
    ends = [2 * index if index < halved else halved + index for index in range(microbatches + 1)]
    warmup = min(ranks - 1 - rank, microbatches)
    ops = array("q", span(Kind.F, rank, 0, ends[warmup]))
    for index in range(microbatches):
        if warmup + index < microbatches:
            ops.extend(span(Kind.F, rank, ends[warmup + index], ends[warmup + index + 1]))
        ops.extend(span(Kind.B, rank, ends[index], ends[index + 1]))
    return ops
