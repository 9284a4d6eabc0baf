"""Orders of no-flush schedules: each rank's operations, window by window, without a flush.

An update window (window for short) is the micro-batches of one update. *Cut* t lies on each rank
directly after the rank's last backward of window t. The *segment* of window t is what the rank does
between cuts t-1 and t; segments differ only in the indices of the micro-batches. The *fill* is what
is in flight at a cut: forwards of later windows, which an empty pipeline has to run first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.replicated import placed
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.placement import Placement, loop


@dataclass(frozen=True)
class Order:
    """Operations of a no-flush schedule for one update window. Micro-batch 0 is the window's first
    micro-batch; forwards can work on micro-batches of later windows."""

    name: str
    placement: Placement
    microbatches: int
    """Number of micro-batches in an update window."""
    fill: tuple[tuple[Op, ...], ...]
    """Forwards of each rank that run before the first segment."""
    segment: tuple[tuple[Op, ...], ...]
    """Operations of each rank for one window, from the cut before it to the cut after it."""

    @property
    def ahead(self) -> int:
        """Number of micro-batches of later windows that have entered the pipeline at a cut."""
        return max((op.microbatch + 1 for ops in self.fill for op in ops), default=0)


def one_f_one_b(ranks: int, microbatches: int, *, lead: int = 1, extra_warmup: int = 0) -> Order:
    """Make 1F1B that never flushes (PipeDream, 1806.03377). Rank r runs lead * (ranks-1-r) +
    extra_warmup forwards ahead, then alternates F and B.

    With `lead` 2 no rank waits for a message that takes up to half the time of an F and a B.
    `extra_warmup` puts all ranks further ahead (AvgPipe, PPoPP'23). An update window of m
    micro-batches takes m (F + B), the time of its operations.
    """
    name = {1: "1f1b", 2: "eager_1f1b"}[lead]
    ahead = [lead * (ranks - 1 - rank) + extra_warmup for rank in range(ranks)]
    return Order(
        name=name,
        placement=loop(ranks),
        microbatches=microbatches,
        fill=tuple(
            tuple(Op(Kind.F, rank, number) for number in range(count))
            for rank, count in enumerate(ahead)
        ),
        segment=tuple(
            tuple(
                op
                for number in range(microbatches)
                for op in (Op(Kind.F, rank, count + number), Op(Kind.B, rank, number))
            )
            for rank, count in enumerate(ahead)
        ),
    )


def round_robin(
    ranks: int, microbatches: int, ranks_per_stage: Sequence[int] | None = None
) -> Order:
    """Make 1F1B that never flushes, with stages on one or more ranks (PipeDream, 1806.03377):
    micro-batch k runs on rank k mod c of a stage with c ranks.

    The ranks of a stage wait for each other after each update window, to sum its gradients. So they
    work at the same time, not staggered, and must be further ahead than in 1F1B-RR with a flush: by
    c + c' - 2 gcd(c, c') forwards in total over the c ranks of a stage, if the next stage has c'
    ranks. A window takes the time of a rank's operations if all ranks have equally many.

    Raises:
        ScheduleError: `ranks_per_stage` does not add up to `ranks`, or its least common multiple
            does not divide `microbatches`.
    """
    counts, placement = placed(ranks, microbatches, ranks_per_stage)
    ahead = _side_by_side(counts)
    fill, segment = [], []
    for stage, (count, own) in enumerate(zip(counts, ahead, strict=True)):
        for first in range(count):
            numbers = range(first, microbatches, count)
            fill.append(tuple(Op(Kind.F, stage, first + count * n) for n in range(own)))
            segment.append(
                tuple(
                    op
                    for number in numbers
                    for op in (Op(Kind.F, stage, number + count * own), Op(Kind.B, stage, number))
                )
            )
    return Order("1f1b_rr", placement, microbatches, tuple(fill), tuple(segment))


def _side_by_side(counts: Sequence[int]) -> list[int]:
    """Return, by stage, the number of forwards by which each rank of the stage is ahead."""
    ahead = [0]
    for count, following in zip(counts[-2::-1], counts[:0:-1], strict=True):
        slack = count + following - 2 * gcd(count, following)
        ahead.append(-(-((ahead[-1] + 1) * following + slack) // count))
    return ahead[::-1]


def two_group(ranks: int, microbatches: int) -> Order:
    """Make an order in which two groups of layers take turns (WPipe, ICLR'22): rank r has stage r
    of group 0 and stage ranks + r of group 1. Whole update windows of the two groups alternate, and
    rank r runs 2 * microbatches - r forwards ahead of its backwards. So a window's forwards in
    group 0 come before the previous window's update, and its forwards in group 1 after it.

    Raises:
        ScheduleError: fewer micro-batches than ranks - 1.
    """
    least = least_window("two_group", ranks)
    if microbatches < least:
        raise ScheduleError(
            f"schedule two_group: {ranks} ranks need update windows of at least {least} "
            f"micro-batches, not {microbatches}"
        )

    def forward(rank: int, index: int) -> Op:
        window, rest = divmod(index, 2 * microbatches)
        group, number = divmod(rest, microbatches)
        return Op(Kind.F, group * ranks + rank, window * microbatches + number)

    def backward(rank: int, index: int) -> Op:
        group, number = divmod(index, microbatches)
        return Op(Kind.B, (1 - group) * ranks + rank, number)

    return Order(
        name="two_group",
        placement=loop(ranks, 2),
        microbatches=microbatches,
        fill=tuple(
            tuple(forward(rank, index) for index in range(2 * microbatches - rank))
            for rank in range(ranks)
        ),
        segment=tuple(
            tuple(
                op
                for index in range(2 * microbatches)
                for op in (
                    forward(rank, 2 * microbatches - rank + index),
                    backward(rank, index),
                )
            )
            for rank in range(ranks)
        ),
    )


def least_window(name: str, ranks: int) -> int:
    """Return the minimum number of micro-batches in an update window of the order `name`."""
    return max(1, ranks - 1) if name == "two_group" else 1


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    extra_warmup: int = 0,
    ranks_per_stage: Sequence[int] | None = None,
) -> Order:
    """Make the order `name`. `ranks_per_stage` is the number of ranks of each stage, for 1f1b_rr.

    Raises:
        ScheduleError: an unknown name, or sizes that the order does not support.
    """
    if ranks < 1 or microbatches < 1 or extra_warmup < 0:
        raise ScheduleError(
            f"schedule {name}: {ranks} ranks, {microbatches} micro-batches, extra_warmup "
            f"{extra_warmup}: ranks and micro-batches must be at least 1, extra_warmup at least 0"
        )
    if ranks_per_stage is not None and name != "1f1b_rr":
        raise ScheduleError(
            f"schedule {name}: ranks_per_stage must not be given, not {ranks_per_stage}; 1f1b_rr "
            "supports it"
        )
    if name in ("1f1b", "eager_1f1b"):
        lead = 2 if name == "eager_1f1b" else 1
        return one_f_one_b(ranks, microbatches, lead=lead, extra_warmup=extra_warmup)
    if name not in NAMES:
        raise ScheduleError(
            f"schedule {name} always flushes, so it cannot use stale weights; use one of "
            f"{', '.join(NAMES)}"
        )
    if extra_warmup:
        raise ScheduleError(
            f"schedule {name}: extra_warmup must be 0; 1f1b and eager_1f1b support it"
        )
    if name == "1f1b_rr":
        return round_robin(ranks, microbatches, ranks_per_stage)
    return two_group(ranks, microbatches)


NAMES = ("1f1b", "eager_1f1b", "1f1b_rr", "two_group")
