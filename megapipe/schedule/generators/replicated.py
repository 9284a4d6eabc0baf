"""1F1B-RR: stages with several ranks each, which take turns (PipeDream, 1806.03377)."""

from collections.abc import Sequence

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.one_f_one_b import rank_ops
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, replicated


@register("1f1b_rr")
def one_f_one_b_round_robin(
    ranks: int, microbatches: int, replicas: Sequence[int] | None = None
) -> Schedule:
    """1F1B over stages of one rank or more: micro-batch k takes rank k mod c of a stage's c.

    PipeDream's replicated stages, with a flush per step. A stage of c ranks may be c times as long
    as one of a single rank; then all ranks have equal work, and the makespan is at most that of
    1F1B, (m+p-1) (F+B). Each rank of a stage goes w forwards ahead: the least with which the c w of
    the stage are as many as those of the next stage and one more for each of its ranks. On the
    first of two stages w + 1 is the paper's number of micro-batches under way (NOAM), ranks /
    replicas rounded up; on more stages it may be larger, since with NOAM gradients come late where
    it is rounded at an inner stage. Peak: min(w+1, m/c) micro-batches of the stage; weights: a
    copy on each rank. One rank per stage is 1F1B.

    Args:
        replicas: ranks of each stage; those of stage 0 come first. Default: two of stage 0 and one
            of each other, or one of each where there are fewer than three ranks.

    Raises:
        ScheduleError: replicas that do not add up to the ranks, or do not divide the micro-batches.
    """
    counts, placement = placed(ranks, microbatches, replicas)
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
    ranks: int, microbatches: int, replicas: Sequence[int] | None
) -> tuple[list[int], Placement]:
    """The ranks of each stage, by default as above, and where they are.

    Raises:
        ScheduleError: replicas that do not add up to the ranks, or do not divide the micro-batches.
    """
    if replicas is None:
        replicas = [1] * ranks if ranks < 3 else [2] + [1] * (ranks - 2)
    counts = list(replicas)
    if sum(counts) != ranks:
        raise ScheduleError(
            f"schedule 1f1b_rr: replicas {counts} are {sum(counts)} ranks: expected numbers that "
            f"add up to all {ranks}"
        )
    placement = replicated(counts)
    turns = len(placement.table)
    if microbatches % turns:
        raise ScheduleError(
            f"schedule 1f1b_rr: microbatches must be a multiple of {turns} for replicas {counts}, "
            f"not {microbatches}; the next is {-(-microbatches // turns) * turns}"
        )
    return counts, placement


def _warmups(counts: Sequence[int]) -> list[int]:
    """Forwards that each rank of a stage has before its first pair of forward and backward."""
    warmups = [0]
    for count, following in zip(counts[-2::-1], counts[:0:-1], strict=True):
        needed = (warmups[-1] + 1) * following
        warmups.append(-(-needed // count))
    return warmups[::-1]
