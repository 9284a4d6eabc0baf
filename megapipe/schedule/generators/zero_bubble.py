"""Zero-bubble schedules with a split backward (Qi et al., 2401.10241, section 2)."""

from array import array
from itertools import pairwise

from megapipe.schedule.generators.lists import weave
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, packed, span
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
        activation_bound=(min(ranks, microbatches),) * ranks,
    )


@register("zb_h2")
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """ZB-H2: twice the warm-up of 1F1B, so that the ranks idle at their ends alone.

    Bubble of the longest span, for m >= 2p-1, W <= F, W <= I and latency c <= W:
    (p-1)(F+I-2W+2c), which is 0 at equal times and no latency. That of the makespan is then p-1
    slots, as of zb_h1: the gain is real only if a rank may go on to the next step before the
    others have ended this one. Peak: min(2p-1, m) micro-batches on every rank, counted from F to W.
    """
    return Schedule(
        name="zb_h2",
        placement=loop(ranks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, ranks, microbatches, lead=2) for rank in range(ranks)),
        activation_bound=(min(2 * ranks - 1, microbatches),) * ranks,
    )


def rank_ops(rank: int, ranks: int, microbatches: int, lead: int = 1) -> "array[int]":
    """The list of one rank: `lead` forwards more in the warm-up than the rank below, and W
    running lead * r micro-batches behind I on rank r."""
    warmup = min(lead * (ranks - 1 - rank), microbatches)
    behind = min(lead * rank, microbatches)
    forwards, inputs, weights = (
        span(kind, rank, 0, microbatches) for kind in (Kind.F, Kind.I, Kind.W)
    )
    ops = packed(forwards[:warmup])
    last_forward = microbatches - warmup
    for start, stop in pairwise(sorted({0, behind, last_forward, microbatches})):
        columns = [inputs[start:stop]]
        if stop <= last_forward:
            columns.insert(0, forwards[warmup + start : warmup + stop])
        if start >= behind:
            columns.append(weights[start - behind : stop - behind])
        ops.extend(weave(*columns))
    ops.extend(weights[microbatches - behind :])
    return ops
