"""GEMS (Jain et al., SC 2020): two directions in opposite directions, one micro-batch at a time."""

from megapipe.schedule.generators.grid import both_ways
from megapipe.schedule.generators.naive import one_at_a_time
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop


@register("gems")
def gems(ranks: int, microbatches: int) -> Schedule:
    """Micro-batches take turns between the directions, and each follows the one before.

    The backward of a micro-batch ends where the forward of the next begins last, so that forward
    runs right behind it over the ranks. Makespan: m (F+B) + (p-1) (F+B + (m-1) max(F,B)). With
    B = 2F the bubble comes to (p-1)/(p+1/2) as m grows, the value that surveys quote. Peak: one
    micro-batch; weights: two copies. Any m; ranks must be even.
    """
    placement = both_ways("gems", loop(ranks))
    return one_at_a_time("gems", placement, tuple(m % 2 for m in range(microbatches)))
