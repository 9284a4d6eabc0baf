"""Zero-bubble schedules with a split backward (Qi et al., 2401.10241, section 2)."""

from array import array
from itertools import pairwise

from megapipe.schedule.generators.op_lists import weave
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, packed, span
from megapipe.schedule.placement import loop


@register("zb_h1")
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Run ZB-H1: 1F1B with deferred weight gradients, so that input gradients are sent sooner.

    Idle time, for m >= p, W <= F, W <= I and zero latency: (p-1)(F+I-W), a third of 1F1B's at equal
    times. Peak: min(p, m) micro-batches on every rank, counted from F to W. The paper asks for m >=
    p. But forwards and input gradients are in the order of 1F1B, and a W needs only its I on the
    same rank, so any m >= 1 can be executed.
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
    """Run ZB-H2: twice the warm-up of 1F1B, so that a rank idles only before its first and after
    its last operation.

    Bubble within the longest span of a rank, for m >= 2p-1, W <= F, W <= I and latency c <= W:
    (p-1)(F+I-2W+2c), which is 0 at equal times and no latency. The bubble of the makespan is then
    (p-1) F, as for zb_h1: the gain is real only if a rank can begin the next step before the other
    ranks have ended this one. Peak: min(2p-1, m) micro-batches on every rank, from F to W.
    """
    return Schedule(
        name="zb_h2",
        placement=loop(ranks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, ranks, microbatches, lead=2) for rank in range(ranks)),
        activation_bound=(min(2 * ranks - 1, microbatches),) * ranks,
    )


def rank_ops(rank: int, ranks: int, microbatches: int, lead: int = 1) -> "array[int]":
    """Return the operations of one rank, in order. Its warm-up has `lead` forwards more than the
    next rank's; its W run lead * rank micro-batches behind its I."""
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
