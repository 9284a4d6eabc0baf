"""1F1B: one forward, one backward (PipeDream-Flush, 2006.09503; DAPPLE, 2007.01045)."""

from array import array

from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import loop


@register("1f1b", "dapple", "pipedream_flush")
def one_f_one_b(ranks: int, microbatches: int, extra_warmup: int = 0) -> Schedule:
    """Warm up with p-1-r forwards on rank r, then alternate one forward and one backward.

    `extra_warmup` is the number of additional warm-up forwards on each rank (AvgPipe, PPoPP'23).
    Bubble: (p-1)/(m+p-1) of the makespan, as for GPipe. Peak on rank r: min(p-r + extra_warmup, m)
    micro-batches.
    """
    return _warmed_up("1f1b", ranks, microbatches, 1, extra_warmup)


@register("eager_1f1b")
def eager_1f1b(ranks: int, microbatches: int, extra_warmup: int = 0) -> Schedule:
    """Run 1F1B with twice the warm-up, which hides the latency of messages.

    Without latency the makespan is 1F1B's. `extra_warmup` is the number of additional warm-up
    forwards on each rank. Peak on rank r: min(2(p-1-r)+1 + extra_warmup, m) micro-batches.
    """
    return _warmed_up("eager_1f1b", ranks, microbatches, 2, extra_warmup)


def _warmed_up(name: str, ranks: int, microbatches: int, lead: int, extra_warmup: int) -> Schedule:
    """Build 1F1B in which each rank has `lead` warm-up forwards more than the next rank, and the
    last rank has `extra_warmup`."""
    warmups = [min(lead * (ranks - 1 - rank) + extra_warmup, microbatches) for rank in range(ranks)]
    return Schedule(
        name=name,
        placement=loop(ranks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, warmup, microbatches) for rank, warmup in enumerate(warmups)),
        activation_bound=tuple(min(warmup + 1, microbatches) for warmup in warmups),
    )


def rank_ops(
    stage: int, warmup: int, microbatches: int, *, first: int = 0, step: int = 1
) -> "array[int]":
    """Return the operations of one rank: `warmup` forwards, pairs of forward and backward, and the
    remaining backwards.

    They work on every `step`-th micro-batch from micro-batch `first` on.
    """
    forwards = array("q", span(Kind.F, stage, 0, microbatches)[first::step])
    backwards = array("q", span(Kind.B, stage, 0, microbatches)[first::step])
    ops = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        ops.append(forward)
        ops.append(backward)
    ops.extend(backwards[len(backwards) - warmup :])
    return ops
