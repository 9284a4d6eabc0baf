"""A search instance as plain tables, and the exact times of an order of operations.

Micro-batches cost the same, so by an exchange argument each kind of operation at each stage can run
in micro-batch order without loss. It remains to decide how a rank interleaves its *streams*: a
stream is one kind of operation (F, I or W) at one stage, in micro-batch order.

Operations are numbered ``stream * microbatches + microbatch``. The streams are F of every stage, I
of every stage, W of every stage. A *fused* problem has B in place of I, and no W. An *order* is one
list of operation numbers per rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import floor
from typing import Literal, NamedTuple, TypeVar

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import (
    KIND_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    Kind,
    Schedule,
    packed,
    span,
)
from megapipe.schedule.placement import Placement

Objective = Literal["makespan", "span"]
Order = list[list[int]]
NEVER = -(1 << 60)
"""A value below all times and operations. It is the end of an operation that has not run, and the
tail if nothing waits for an operation; it also stands for no operation."""
Value = TypeVar("Value")


class TimedOrder(NamedTuple):
    """An order, and its objective (makespan or longest span)."""

    value: Time
    order: Order


class Problem:
    """The tables of one instance.

    Args:
        placement: placement with one direction.
        cost: costs without jitter. Whole numbers are faster than fractions
            (:func:`~megapipe.schedule.timing.times.in_ticks`).
        limits: memory limit of each rank. The unit is the activations of one micro-batch on a rank
            with 1 / ranks of the model. None: no limit.
        freed: share of an activation that I frees; W frees the rest.
        objective: "makespan" is the time from the first start on any rank to the last end on any
            rank, "span" the maximum over ranks of the time from a rank's first start to its last
            end.
        fused: whether backwards are fused: B in place of I and W.

    Raises:
        ScheduleError: a cost that does not fit the stages, or a placement with several directions.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        cost: Cost,
        *,
        limits: Sequence[Fraction] | None = None,
        freed: Fraction = Fraction(0),
        objective: Objective = "makespan",
        fused: bool = False,
    ) -> None:
        if len(placement.table) > 1:
            raise ScheduleError(
                f"search: the placement has {len(placement.table)} directions; it must have one"
            )
        self.placement, self.microbatches, self.cost = placement, microbatches, cost
        self.limits, self.freed, self.objective, self.fused = limits, freed, objective, fused
        self.stages = placement.stages
        self.chunks = [placement.stages_of(rank) for rank in range(placement.ranks)]
        self.kinds = (Kind.F, Kind.B) if fused else (Kind.F, Kind.I, Kind.W)
        self.row = self.stages * microbatches
        """Number of operations of one kind."""
        self.size = len(self.kinds) * self.row
        times, lags = self._times()
        amounts, self.room = self._amounts()
        self.rank = self._each(placement.table[0] * len(self.kinds))
        self.duration = self._each(times)
        self.lag = self._each(lags)
        """Time of the message that each operation waits for."""
        self.amount = self._each(amounts)
        """Change of the memory for activations on the rank when an operation runs. A unit is 1 / n
        of an activation, where n is the denominator of `freed`."""
        self.needs = [self.size] * self.size
        """The operation whose message an operation waits for; `size` if none. (A W needs its I,
        which is earlier in the list of the same rank.)"""
        self.feeds = [self.size] * self.size
        self.lag_after: list[Time] = [0] * self.size
        for stream, source in self.sources():
            for op in range(stream * microbatches, (stream + 1) * microbatches):
                need = op + (source - stream) * microbatches
                self.needs[op], self.feeds[need] = need, op
                self.lag_after[need] = self.lag[op]

    def of_size(self, microbatches: int) -> "Problem":
        """Return this problem for another number of micro-batches."""
        return Problem(
            self.placement,
            microbatches,
            self.cost,
            limits=self.limits,
            freed=self.freed,
            objective=self.objective,
            fused=self.fused,
        )

    def _each(self, of_streams: Iterable[Value]) -> list[Value]:
        return [value for value in of_streams for _ in range(self.microbatches)]

    def sources(self) -> Iterator[tuple[int, int]]:
        """Yield the streams that wait for a message, each with the stream that sends it."""
        last = self.stages - 1
        for stage in range(self.stages):
            if stage > 0:
                yield stage, stage - 1
            back = self.stages + stage
            yield back, back + 1 if stage < last else last

    def _times(self) -> tuple[list[Time], list[Time]]:
        """Return, by stream, the time of an operation and of the message that it waits for."""
        cost, rank_of = self.cost, self.placement.table[0]
        table = cost.table(self.stages)
        times = [table[kind][stage] for kind in self.kinds for stage in range(self.stages)]
        lags: list[Time] = [0] * len(times)
        for stream, source in self.sources():
            link = cost.link(rank_of[source % self.stages], rank_of[stream % self.stages])
            if cost.overlap:
                lags[stream] = link
            else:  # the sender waits for the end of each message
                times[source] += link
        return times, lags

    def _amounts(self) -> tuple[list[int], list[int]]:
        """Return, by stream, the change of activation memory by an operation, and, by rank, the
        memory limit."""
        grain = self.freed.denominator
        changes = {Kind.F: grain, Kind.B: -grain}
        changes[Kind.I] = -int(self.freed * grain)
        changes[Kind.W] = -grain - changes[Kind.I]
        amounts = [changes[kind] for kind in self.kinds for _ in range(self.stages)]
        if self.limits is None:
            return amounts, [grain * self.row] * self.placement.ranks
        return amounts, [
            floor(limit * grain / self.placement.stage_shares[0]) for limit in self.limits
        ]

    def fits(self, order: Order) -> bool:
        """Whether an order keeps the memory limit of every rank."""
        amount = self.amount
        for room, ops in zip(self.room, order, strict=True):
            held = 0
            for op in ops:
                held += amount[op]
                if held > room:
                    return False
        return True

    def ends(self, order: Order) -> tuple[list[Time], list[int]] | None:
        """Return the end of each operation, and all operations in topological order. Return None if
        the order deadlocks.

        The list of ends has one more entry, 0: the input of operations that need no message.
        """
        needs, lag, duration = self.needs, self.lag, self.duration
        ends: list[Time] = [NEVER] * self.size
        ends.append(0)
        cursor = [0] * len(order)
        free: list[Time] = [0] * len(order)
        sequence: list[int] = []
        waiting: dict[int, int] = {}
        ready = list(range(len(order)))
        while ready:
            rank = ready.pop()
            ops, now = order[rank], free[rank]
            for index in range(cursor[rank], len(ops)):
                op = ops[index]
                need = needs[op]
                arrived = ends[need]
                if arrived == NEVER:
                    waiting[need] = rank
                    cursor[rank] = index
                    break
                arrived += lag[op]
                if arrived > now:
                    now = arrived
                now += duration[op]
                ends[op] = now
                sequence.append(op)
                if op in waiting:
                    ready.append(waiting.pop(op))
            free[rank] = now
        return None if waiting else (ends, sequence)

    def offsets(self, order: Order, ends: list[Time]) -> list[Time]:
        """Return, by rank, the time from which the objective is measured: 0 for "makespan", the
        rank's first start for "span"."""
        if self.objective == "makespan":
            return [0] * len(order)
        return [ends[ops[0]] - self.duration[ops[0]] for ops in order]

    def value(self, order: Order, ends: list[Time]) -> Time:
        """Return the objective of an order, given the ends of its operations."""
        offsets = self.offsets(order, ends)
        return max(ends[ops[-1]] - offset for ops, offset in zip(order, offsets, strict=True))

    def timed(self, order: Order) -> TimedOrder | None:
        """Return an order with its objective; None if it deadlocks."""
        run = self.ends(order)
        return None if run is None else TimedOrder(self.value(order, run[0]), order)

    def tails(self, order: Order, ends: list[Time], sequence: list[int]) -> list[Time]:
        """Return the tail of each operation: the time from its start to the end of everything that
        depends on it.

        An operation is critical if start + tail is the objective. The list has one more entry: the
        tail behind an operation whose output nothing needs.
        """
        feeds, lag_after, duration, rank_of = self.feeds, self.lag_after, self.duration, self.rank
        tails: list[Time] = [NEVER] * (self.size + 1)
        after = [-offset for offset in self.offsets(order, ends)]
        for op in reversed(sequence):
            rank = rank_of[op]
            tail = tails[feeds[op]] + lag_after[op]
            if after[rank] > tail:
                tail = after[rank]
            tails[op] = after[rank] = tail + duration[op]
        return tails

    def schedule(self, order: Order) -> Schedule:
        """Return the schedule of an order."""
        codes: list[int] = []
        for kind in self.kinds:
            for stage in range(self.stages):
                codes.extend(span(kind, stage, 0, self.microbatches))
        lists = tuple(packed(codes[op] for op in ops) for ops in order)
        return Schedule("searched", self.placement, self.microbatches, lists)

    def order(self, schedule: Schedule) -> Order | None:
        """Convert a schedule of whole micro-batches on this placement to an order. Return None if
        it has other kinds of operations, or a stream that is not in micro-batch order.

        A B becomes an I and a W, unless the problem is fused.
        """
        m, row = self.microbatches, self.row
        bases_of = {Kind.F: [0], Kind.B: [row] if self.fused else [row, 2 * row]}
        if not self.fused:
            bases_of |= {Kind.I: [row], Kind.W: [2 * row]}
        following = list(range(0, self.size, m))
        lists: Order = []
        for codes in schedule.ops:
            ops: list[int] = []
            for code in codes:
                bases = bases_of.get(Kind(code & KIND_MASK))
                if bases is None:
                    return None
                index = (code >> STAGE_SHIFT & STAGE_MASK) * m + (code >> MICROBATCH_SHIFT)
                for base in bases:
                    if following[(base + index) // m] != base + index:
                        return None
                    following[(base + index) // m] += 1
                    ops.append(base + index)
            lists.append(ops)
        return lists
