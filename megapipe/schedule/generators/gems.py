"""GEMS (Jain et al., SC 2020): two pipelines in opposite directions, one micro-batch at a time."""

from megapipe.schedule.generators.grid import bidirectional
from megapipe.schedule.generators.naive import one_at_a_time
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop


@register("gems")
def gems(ranks: int, microbatches: int) -> Schedule:
    """Run one micro-batch after the other; they take turns between the two directions.

    The backward of a micro-batch and the forward of the next one visit the ranks in the same order,
    so the forward follows right behind. Makespan: m (F+B) + (p-1) (F+B + (m-1) max(F,B)). With B =
    2F the bubble comes to (p-1)/(p+1/2) as m grows, the value that surveys quote. Peak: one
    micro-batch; weights: two replicas. Any m; ranks must be even.
    """
    placement = bidirectional("gems", loop(ranks))
    return one_at_a_time("gems", placement, tuple(m % 2 for m in range(microbatches)))
