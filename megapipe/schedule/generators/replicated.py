"""1F1B-RR: stages on several ranks, which take micro-batches in turn (PipeDream, 1806.03377)."""

from collections.abc import Sequence

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.one_f_one_b import rank_ops
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, replicated


@register("1f1b_rr")
def one_f_one_b_round_robin(
    ranks: int, microbatches: int, ranks_per_stage: Sequence[int] | None = None
) -> Schedule:
    """Run 1F1B over replicated stages: micro-batch k runs on rank k mod c of a stage with c ranks.

    It has PipeDream's replicated stages, and a flush per step. A stage of c ranks can have c times
    as many layers as a stage of one rank. Then all ranks have equal work, and the makespan is at
    most 1F1B's, (m+p-1) (F+B). Each rank of a stage has w warm-up forwards. If the next stage has
    c' ranks with w' warm-up forwards each, w is the smallest number with c w >= c' (w' + 1). On the
    first of two stages, w + 1 is the paper's number of micro-batches in flight (NOAM), ranks /
    replicas rounded up. With more stages w + 1 can be larger: at an inner stage NOAM would delay
    gradients. Peak on each rank: min(w+1, m/c) micro-batches; weights: a replica on each rank. With
    one rank per stage it is 1F1B.

    Args:
        ranks_per_stage: number of ranks of each stage; the ranks of stage 0 come first. Default:
            two for stage 0 and one for every other stage, or one for each if ranks < 3.

    Raises:
        ScheduleError: `ranks_per_stage` does not add up to `ranks`, or its least common multiple
            does not divide `microbatches`.
    """
    counts, placement = placed(ranks, microbatches, ranks_per_stage)
    turns = len(placement.table)
    ops, held = [], []
    for stage, (count, ahead) in enumerate(zip(counts, _warmups(counts), strict=True)):
        own = microbatches // count
        warmup = min(ahead, own)
        for first in range(count):
            ops.append(rank_ops(stage, warmup, microbatches, first=first, step=count))
            held.append(min(warmup + 1, own))
    return Schedule(
        name="1f1b_rr",
        placement=placement,
        microbatches=microbatches,
        ops=tuple(ops),
        activation_bound=tuple(held),
        direction=tuple(m % turns for m in range(microbatches)) if turns > 1 else None,
    )


def placed(
    ranks: int, microbatches: int, ranks_per_stage: Sequence[int] | None
) -> tuple[list[int], Placement]:
    """Return the number of ranks of each stage and the placement. If `ranks_per_stage` is None,
    stage 0 has two ranks and every other stage one (with fewer than three ranks: one each).

    Raises:
        ScheduleError: `ranks_per_stage` does not add up to `ranks`, or its least common multiple
            does not divide `microbatches`.
    """
    if ranks_per_stage is None:
        ranks_per_stage = [1] * ranks if ranks < 3 else [2] + [1] * (ranks - 2)
    counts = list(ranks_per_stage)
    if sum(counts) != ranks:
        raise ScheduleError(
            f"schedule 1f1b_rr: ranks_per_stage {counts} adds up to {sum(counts)} ranks; it must "
            f"add up to {ranks}"
        )
    placement = replicated(counts)
    turns = len(placement.table)
    if microbatches % turns:
        raise ScheduleError(
            f"schedule 1f1b_rr: microbatches must be a multiple of {turns} for ranks_per_stage "
            f"{counts}, not {microbatches}; the next is {-(-microbatches // turns) * turns}"
        )
    return counts, placement


def _warmups(counts: Sequence[int]) -> list[int]:
    """Return, by stage, the number of warm-up forwards of each rank of the stage."""
    warmups = [0]
    for count, following in zip(counts[-2::-1], counts[:0:-1], strict=True):
        needed = (warmups[-1] + 1) * following
        warmups.append(-(-needed // count))
    return warmups[::-1]
