"""1F1B-RR: stages with several ranks each, which take turns (PipeDream, 1806.03377)."""

from collections.abc import Sequence

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.one_f_one_b import rank_ops
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import replicated


@register("1f1b_rr")
def one_f_one_b_round_robin(
    ranks: int, microbatches: int, replicas: Sequence[int] | None = None
) -> Schedule:
    """1F1B over stages of one rank or more: micro-batch k takes rank k mod c of a stage's c.

    PipeDream's replicated stages, with a flush per step. A stage of c ranks may be c times as long
    as one of a single rank, and then all ranks have equal work. With w ranks behind a stage each of
    its ranks goes ceil(w/c) forwards ahead, which is the paper's number of micro-batches under way
    (NOAM); it is enough for the order to be executed, as fewer are ahead at each next stage. Peak:
    min(ceil(w/c)+1, m/c) micro-batches of the stage; weights: a copy on each rank. One rank per
    stage is 1F1B.

    Args:
        replicas: ranks of each stage; those of stage 0 come first. Default: two of stage 0 and one
            of each other, or one of each where there are fewer than three ranks.

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
    ops, held = [], []
    for stage, count in enumerate(counts):
        behind = sum(counts[stage + 1 :])
        warmup = min(-(-behind // count), microbatches // count)
        for first in range(count):
            ops.append(rank_ops(stage, warmup, microbatches, first=first, step=count))
            held.append(min(warmup + 1, microbatches // count))
    return Schedule(
        name="1f1b_rr",
        placement=placement,
        microbatches=microbatches,
        ops=tuple(ops),
        held_limit=tuple(held),
        direction=tuple(m % turns for m in range(microbatches)) if turns > 1 else None,
    )
