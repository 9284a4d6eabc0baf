"""Zero-bubble schedules with a split backward (Qi et al., 2401.10241)."""

from array import array

from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import loop


@register("zb_h1")
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients wait so that the input gradients travel sooner.

    Idle time, for m >= p, W <= F, W <= I and zero latency: (p-1)(F+I-W), a third of 1F1B's at
    equal times. Peak: min(p, m) micro-batches on every rank, counted from F to W. The paper asks
    for m >= p; but forwards and input gradients are in the order of 1F1B, and a W needs only its
    own I on the same rank, so any m >= 1 can be executed.
    """
    return Schedule(
        name="zb_h1",
        placement=loop(ranks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, ranks, microbatches) for rank in range(ranks)),
        held_limit=(min(ranks, microbatches),) * ranks,
    )


def rank_ops(rank: int, ranks: int, microbatches: int) -> "array[int]":
    """The list of one rank: as 1F1B, with W running r micro-batches behind I on rank r."""
    warmup = min(ranks - 1 - rank, microbatches)
    forwards = span(Kind.F, rank, 0, microbatches)
    weights = span(Kind.W, rank, 0, microbatches)
    ops = array("q", forwards[:warmup])
    for microbatch, input_gradient in enumerate(span(Kind.I, rank, 0, microbatches)):
        if warmup + microbatch < microbatches:
            ops.append(forwards[warmup + microbatch])
        ops.append(input_gradient)
        if microbatch >= rank:
            ops.append(weights[microbatch - rank])
    ops.extend(weights[max(0, microbatches - rank) :])
    return ops
