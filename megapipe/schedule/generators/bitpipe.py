"""BitPipe (Wu et al., 2410.19367): V-shaped pipelines in both directions at once."""

from megapipe.schedule.generators.grid import bidirectional
from megapipe.schedule.generators.hanayo import in_waves, waves_of
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import wave


@register("bitpipe")
def bitpipe(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Run two V-shaped pipelines in opposite directions; micro-batches take turns between them.

    Both have the order of :mod:`~megapipe.schedule.generators.hanayo`: each pipeline runs in the
    time slots in which the other would idle. The paper runs units of p micro-batches one after the
    other. Here units overlap: the idle time does not grow with the number of units, even if F and B
    differ. Idle time if p divides m: (p-2) max(F,B) / v, where F and B are the times of 1/p of the
    model. For other m the idle time is larger, but below 1F1B's. Peak: at most p micro-batches;
    weights: two replicas. Any m; ranks must be even.

    Args:
        chunks: number of chunks per rank and direction; it must be even, as each wave has two.

    Raises:
        ScheduleError: odd ranks or chunks.
    """
    placement = bidirectional("bitpipe", wave(ranks, waves_of("bitpipe", chunks)))
    return in_waves("bitpipe", placement, microbatches)
