"""Breadth-first pipeline parallelism (Lamy-Poirier, 2211.05953), also known as looped BFS."""

from dataclasses import replace

from megapipe.schedule.generators.gpipe import gpipe_on
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop


@register("breadth_first")
def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Run all forwards chunk by chunk, then all backwards chunk by chunk.

    The gradients of a chunk are complete when its last backward ends, long before the step ends,
    and sharded weights are gathered once per chunk. Idle time, for m >= p: (p-1)(F+B)/v, where F
    and B are the times of 1/p of the model. Peak: all m micro-batches. The schedule is GPipe on the
    loop placement.
    """
    return replace(gpipe_on(loop(ranks, chunks), microbatches), name="breadth_first")
