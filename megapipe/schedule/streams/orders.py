"""Lists of operations window by window, without a flush in between.

A window is the micro-batches of one update. *Cut* t lies on each rank right behind its last
backward of window t; the *segment* of window t is what it does between cuts t-1 and t, and is the
same for all windows but for the numbers of the micro-batches. The *fill* is what is in flight at a
cut: forwards of windows to come, which an empty pipeline has to run first.
"""

from dataclasses import dataclass

from megapipe.errors import ScheduleError
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

    def in_flight(self, rank: int) -> int:
        """Forwards that a rank is ahead of its backwards at a cut."""
        return len(self.fill[rank])


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


def two_group(ranks: int, microbatches: int) -> Order:
    """Two groups of layers that take turns (WPipe, ICLR'22): rank r has stage r of group 0 and
    stage ranks + r of group 1, whole windows of one group follow whole windows of the other, and
    2m - r forwards are ahead of the backwards. So the forwards of a window at group 0 come before
    the update of the window before, and those at group 1 after it.

    Raises:
        ScheduleError: fewer micro-batches than ranks - 1.
    """
    if microbatches < ranks - 1:
        raise ScheduleError(
            f"schedule two_group: {ranks} ranks need windows of at least {ranks - 1} "
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


def build(name: str, ranks: int, microbatches: int, *, advance: int = 0) -> Order:
    """The order of a name.

    Raises:
        ScheduleError: an unknown name, or a number that the order cannot have.
    """
    if ranks < 1 or microbatches < 1 or advance < 0:
        raise ScheduleError(
            f"schedule {name}: {ranks} ranks, {microbatches} micro-batches and advance {advance}: "
            "the first two are at least 1, the last at least 0"
        )
    if name in ("1f1b", "eager_1f1b"):
        lead = 2 if name == "eager_1f1b" else 1
        return one_f_one_b(ranks, microbatches, lead=lead, advance=advance)
    if name != "two_group":
        raise ScheduleError(
            f"schedule {name} always flushes: stale weights gain nothing; take {', '.join(NAMES)}"
        )
    if advance:
        raise ScheduleError("schedule two_group: advance must be 0; 1f1b and eager_1f1b have it")
    return two_group(ranks, microbatches)


NAMES = ("1f1b", "eager_1f1b", "two_group")
