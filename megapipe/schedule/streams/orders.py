"""Lists of operations window by window, without a flush in between.

A window is the micro-batches of one update. *Cut* t lies on each rank right behind its last
backward of window t; the *segment* of window t is what it does between cuts t-1 and t, and is the
same for all windows but for the numbers of the micro-batches. The *fill* is what is in flight at a
cut: forwards of windows to come, which an empty pipeline has to run first.
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
    """The operations of a stream. Micro-batches are counted from the first one of the segment's
    window; those of forwards may be of later windows."""

    name: str
    placement: Placement
    microbatches: int
    """Of a window."""
    fill: tuple[tuple[Op, ...], ...]
    """Per rank, the forwards that run before the first segment."""
    segment: tuple[tuple[Op, ...], ...]
    """Per rank, the operations from one cut to the next."""

    @property
    def ahead(self) -> int:
        """Micro-batches behind a cut of which some rank has run its forward there."""
        return max((op.microbatch + 1 for ops in self.fill for op in ops), default=0)


def one_f_one_b(ranks: int, microbatches: int, *, lead: int = 1, advance: int = 0) -> Order:
    """1F1B that never flushes (PipeDream, 1806.03377): rank r is lead * (ranks-1-r) + advance
    forwards ahead, and alternates. With twice the `lead` a message has the time of half a pair of
    operations to arrive; `advance` puts all ranks that much further ahead (AvgPipe, PPoPP'23).

    A window takes the time of its own operations, m (F + B).
    """
    name = {1: "1f1b", 2: "eager_1f1b"}[lead]
    ahead = [lead * (ranks - 1 - rank) + advance for rank in range(ranks)]
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


def round_robin(ranks: int, microbatches: int, replicas: Sequence[int] | None = None) -> Order:
    """1F1B over stages of one rank or more that never flushes (PipeDream, 1806.03377): micro-batch
    k takes rank k mod c of a stage's c.

    The ranks of a stage meet behind each window, to add up its gradients, so they run side by side
    and not one behind the other. For that, each is further ahead than in the order that flushes,
    by what two neighbouring stages take and give at a time beyond one micro-batch. So a window
    takes the time of its own operations, if each rank has equally many.

    Raises:
        ScheduleError: replicas that do not add up to the ranks, or do not divide the window.
    """
    counts, placement = placed(ranks, microbatches, replicas)
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
    """Forwards by which each rank of a stage is ahead."""
    ahead = [0]
    for count, following in zip(counts[-2::-1], counts[:0:-1], strict=True):
        slack = count + following - 2 * gcd(count, following)
        ahead.append(-(-((ahead[-1] + 1) * following + slack) // count))
    return ahead[::-1]


def two_group(ranks: int, microbatches: int) -> Order:
    """Two groups of layers that take turns (WPipe, ICLR'22): rank r has stage r of group 0 and
    stage ranks + r of group 1, whole windows of one group follow whole windows of the other, and
    2m - r forwards are ahead of the backwards. So the forwards of a window at group 0 come before
    the update of the window before, and those at group 1 after it.

    Raises:
        ScheduleError: fewer micro-batches than ranks - 1.
    """
    least = least_window("two_group", ranks)
    if microbatches < least:
        raise ScheduleError(
            f"schedule two_group: {ranks} ranks need windows of at least {least} "
            f"micro-batches, not {microbatches}"
        )

    def forward(rank: int, place: int) -> Op:
        window, rest = divmod(place, 2 * microbatches)
        group, number = divmod(rest, microbatches)
        return Op(Kind.F, group * ranks + rank, window * microbatches + number)

    def backward(rank: int, place: int) -> Op:
        group, number = divmod(place, microbatches)
        return Op(Kind.B, (1 - group) * ranks + rank, number)

    return Order(
        name="two_group",
        placement=loop(ranks, 2),
        microbatches=microbatches,
        fill=tuple(
            tuple(forward(rank, place) for place in range(2 * microbatches - rank))
            for rank in range(ranks)
        ),
        segment=tuple(
            tuple(
                op
                for place in range(2 * microbatches)
                for op in (
                    forward(rank, 2 * microbatches - rank + place),
                    backward(rank, place),
                )
            )
            for rank in range(ranks)
        ),
    )


def least_window(name: str, ranks: int) -> int:
    """The fewest micro-batches of a window in an order of that name."""
    return max(1, ranks - 1) if name == "two_group" else 1


def build(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    advance: int = 0,
    replicas: Sequence[int] | None = None,
) -> Order:
    """The order of a name; `replicas`: of 1f1b_rr, the ranks of each stage.

    Raises:
        ScheduleError: an unknown name, or a number that the order cannot have.
    """
    if ranks < 1 or microbatches < 1 or advance < 0:
        raise ScheduleError(
            f"schedule {name}: {ranks} ranks, {microbatches} micro-batches and advance {advance}: "
            "the first two are at least 1, the last at least 0"
        )
    if replicas is not None and name != "1f1b_rr":
        raise ScheduleError(
            f"schedule {name}: replicas must not be given, not {replicas}; 1f1b_rr takes it"
        )
    if name in ("1f1b", "eager_1f1b"):
        lead = 2 if name == "eager_1f1b" else 1
        return one_f_one_b(ranks, microbatches, lead=lead, advance=advance)
    if name not in NAMES:
        raise ScheduleError(
            f"schedule {name} always flushes: stale weights gain nothing; take {', '.join(NAMES)}"
        )
    if advance:
        raise ScheduleError(f"schedule {name}: advance must be 0; 1f1b and eager_1f1b have it")
    if name == "1f1b_rr":
        return round_robin(ranks, microbatches, replicas)
    return two_group(ranks, microbatches)


NAMES = ("1f1b", "eager_1f1b", "1f1b_rr", "two_group")
