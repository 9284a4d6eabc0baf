"""1F1B: one forward, one backward (PipeDream-Flush, 2006.09503; DAPPLE, 2007.01045)."""

from array import array

from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule, span
from megapipe.schedule.placement import loop


@register("1f1b", "dapple", "pipedream_flush")
def one_f_one_b(ranks: int, microbatches: int, advance: int = 0) -> Schedule:
    """Warm up with just enough forwards, then alternate; `advance`: so many more on each rank
    (AvgPipe, PPoPP'23).

    Bubble: (p-1)/(m+p-1) of the makespan, as GPipe. Peak on rank r: min(p-r + advance, m)
    micro-batches.
    """
    return _warmed_up("1f1b", ranks, microbatches, 1, advance)


@register("eager_1f1b")
def eager_1f1b(ranks: int, microbatches: int, advance: int = 0) -> Schedule:
    """1F1B with twice the warm-up, so that a message may take a while before anyone waits for it.

    Without latency its makespan is that of 1F1B. Peak on rank r: min(2(p-1-r)+1 + advance, m)
    micro-batches.
    """
    return _warmed_up("eager_1f1b", ranks, microbatches, 2, advance)


def _warmed_up(name: str, ranks: int, microbatches: int, lead: int, advance: int) -> Schedule:
    """Forwards ahead of the backwards by `lead` for each rank that comes after, and `advance`."""
    warmups = [min(lead * (ranks - 1 - rank) + advance, microbatches) for rank in range(ranks)]
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
    """The list of one rank: `warmup` forwards, pairs of forward and backward, the rest.

    It has every `step`-th micro-batch from the `first` on.
    """
    forwards = array("q", span(Kind.F, stage, 0, microbatches)[first::step])
    backwards = array("q", span(Kind.B, stage, 0, microbatches)[first::step])
    ops = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        ops.append(forward)
        ops.append(backward)
    ops.extend(backwards[len(backwards) - warmup :])
    return ops
