"""BitPipe (Wu et al., 2410.19367): V-shaped pipelines in both directions at once."""

from megapipe.schedule.generators.grid import both_ways
from megapipe.schedule.generators.hanayo import in_waves, waves_of
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import wave


@register("bitpipe")
def bitpipe(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Two V placements with opposite ranks, each taking every second micro-batch.

    The order is that of :mod:`~megapipe.schedule.generators.hanayo` on both: where one pipeline
    leaves cells of the grid open, the other fills them. The paper puts units of p micro-batches
    one after the other; here the units lock together, so that the idle time does not grow with
    their number where F and B differ. Idle time for m a multiple of p: (p-2) max(F,B) / v, with F
    and B those of a full rank; for other m it is larger, below that of 1F1B. Peak: at most p
    micro-batches; weights: two copies. Any m; ranks must be even.

    Args:
        chunks: chunks per rank of one direction, even; each two more are a further wave.

    Raises:
        ScheduleError: odd ranks or chunks.
    """
    placement = both_ways("bitpipe", wave(ranks, waves_of("bitpipe", chunks)))
    return in_waves("bitpipe", placement, microbatches)
