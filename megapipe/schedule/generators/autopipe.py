"""AutoPipe: 1F1B with halved micro-batches at the start, so that the last stage begins sooner."""

from array import array
from fractions import Fraction

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import loop


@register("autopipe")
def autopipe(ranks: int, microbatches: int, cost: Cost | None = None) -> Schedule:
    """Run 1F1B, with the first n micro-batches split in two by samples (Liu et al., CLUSTER 2022).

    The order is 1F1B; the halves of a micro-batch run one after the other. The last stage begins
    after (p-1) F/2 instead of (p-1) F, and the makespan is shorter by the same time. Peak: min(p-r,
    m) micro-batches on rank r, as for 1F1B.

    The paper solves an equation for n. Here n is the smallest number with which the last stage
    never waits once it has begun. Micro-batch n, the first whole one, arrives at the last stage n F
    + (p-1) F after the start. The last stage is ready for it n (F+B) + (p-1) F/2 after the start.
    So n is min(m, ceil((p-1) F / 2B)).

    Args:
        cost: times of F and B; default F = 1, B = 2. If times differ by stage, (p-1) F is the sum
            of F over all stages except the last, and B is the last stage's.
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
    """Return the operations of one rank: 1F1B in which the first `halved` micro-batches are each
    replaced by two halves."""
    ends = [2 * index if index < halved else halved + index for index in range(microbatches + 1)]
    warmup = min(ranks - 1 - rank, microbatches)
    ops = array("q", span(Kind.F, rank, 0, ends[warmup]))
    for index in range(microbatches):
        if warmup + index < microbatches:
            ops.extend(span(Kind.F, rank, ends[warmup + index], ends[warmup + index + 1]))
        ops.extend(span(Kind.B, rank, ends[index], ends[index + 1]))
    return ops
