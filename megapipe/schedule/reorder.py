"""Shorter orders at the same peak: operations move into the gaps of a schedule.

:func:`compact` moves whatever fits, at equal times, and leaves a steady state without gaps as it
is. :func:`refill` moves weight gradients alone, at any times. Together they are the last step of
the building-block method (Qi et al., 2405.15362); each works on any schedule with one replica
whose operations are F with B, or F, I and W, of whole sequences.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import cast

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.edges import LOW, UNIT_SHIFT, Edges
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_MASK, STAGE_SHIFT, Kind, Schedule, packed
from megapipe.schedule.simulate import simulate
from megapipe.schedule.validate import validate


def reorder(schedule: Schedule, cost: Cost | None = None) -> Schedule:
    """:func:`compact` and :func:`refill` at equal times, then :func:`refill` at the given cost."""
    schedule = refill(compact(schedule))
    return refill(schedule, cost) if cost else schedule


def compact(schedule: Schedule) -> Schedule:
    """Move operations ahead into idle slots, where F, I and W take one slot and B two.

    In the order of their starts, each operation takes the first idle slots of its rank after its
    inputs and after the one before of its kind and stage; a forward only as far ahead as the rank
    then holds no more than any rank of the given schedule did. So no operation gets later, the
    peak does not rise, and a steady state without idle slots stays what it is.

    Raises:
        ScheduleError: the schedule cannot be executed, or is not of the plain form.
    """
    edges = _plain(schedule)
    need, make = edges.base
    limit = max(validate(schedule).peak_held)
    timeline = simulate(schedule)
    starts = cast("tuple[Sequence[int], ...]", timeline.starts)  # whole, as the costs are
    ends = cast("tuple[Sequence[int], ...]", timeline.ends)
    rows = [_Row(*row) for row in zip(starts, ends, schedule.ops, strict=True)]
    cells = sorted(
        (start, rank, code, end - start)
        for rank, row in enumerate(zip(starts, ends, schedule.ops, strict=True))
        for start, end, code in zip(*row, strict=True)
    )
    made = [0] * edges.slots
    before: dict[int, int] = {}
    moved: list[list[tuple[int, int]]] = [[] for _ in rows]
    for start, rank, code, slots in cells:
        kind, low, unit = code & KIND_MASK, code & LOW, code >> UNIT_SHIFT
        ready = max(made[need[low] + unit], before.get(low, 0))
        if kind == Kind.W:
            ready = max(ready, made[make[low - Kind.W + Kind.I] + unit])
        elif kind != Kind.F:
            ready = max(ready, made[make[low - kind + Kind.F] + unit])
        if ready < start:
            start = rows[rank].move(kind, start, slots, ready, limit)
        before[low] = made[make[low] + unit] = start + slots
        moved[rank].append((start, code))
    ops = tuple(packed(code for _, code in sorted(row)) for row in moved)
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, ops)


class _Row:
    """The slots of one rank: which are taken, and how many activations it holds in each."""

    def __init__(self, starts: Sequence[int], ends: Sequence[int], ops: Sequence[int]) -> None:
        self.taken = bytearray(ends[-1])
        self.held = [0] * ends[-1]
        held = now = 0
        for start, end, code in zip(starts, ends, ops, strict=True):
            self.held[now:start] = [held] * (start - now)
            self.taken[start:end] = b"\1" * (end - start)
            kind = code & KIND_MASK
            held += kind == Kind.F
            self.held[start:end] = [held] * (end - start)
            held -= kind in (Kind.B, Kind.W)
            now = end

    def move(self, kind: int, start: int, slots: int, ready: int, limit: int) -> int:
        """Move an operation to the first idle slots from `ready` on; where it starts then."""
        first = ready
        if kind == Kind.F:
            first = start
            while first > ready and self.held[first - 1] < limit:
                first -= 1
        self.taken[start : start + slots] = bytes(slots)
        place = self.taken.find(bytes(slots), first)
        self.taken[place : place + slots] = b"\1" * slots
        if kind == Kind.F:
            for slot in range(place, start):
                self.held[slot] += 1
        elif kind != Kind.I:
            for slot in range(place + slots, start + slots):
                self.held[slot] -= 1
        return place


def refill(schedule: Schedule, cost: Cost | None = None) -> Schedule:
    """Take the weight gradients out and run them where their rank would idle.

    All other operations keep their order. A W runs where it ends before the input of the next
    operation arrives, where a forward needs its room (no rank holds more than any rank of the
    given schedule did), and at the end of the list. A second attempt also starts a W where it ends
    too late. The result is the shortest, by makespan and then by the longest span, of the given
    schedule and the two attempts. The weight gradients of a rank run in the order of their inputs.

    Raises:
        ScheduleError: the schedule cannot be executed, or is not of the plain form.
    """
    cost = cost or Cost()
    limit = max(validate(schedule).peak_held)
    tries = [schedule] + [_refilled(schedule, cost, limit, eager) for eager in (False, True)]
    return min(tries, key=lambda attempt: duration(attempt, cost))


def duration(schedule: Schedule, cost: Cost) -> tuple[Time, Time]:
    """Makespan and longest span."""
    timeline = simulate(schedule, cost)
    return timeline.makespan, max(timeline.spans)


def _refilled(schedule: Schedule, cost: Cost, limit: int, eager: bool) -> Schedule:
    edges = _plain(schedule)
    need, make = edges.base
    table = cost.table(edges.stages)
    lag = [0 if edge is None else cost.link(*edge) for edge in edges.incoming]
    ends: list[Time | None] = [None] * edges.slots
    ends[edges.always : edges.always + edges.units] = [0] * edges.units
    ranks = [_Rank(ops, table) for ops in schedule.ops]
    waiting: dict[int, _Rank] = {}
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        while rank.order:
            code = rank.order[0]
            low, unit = code & LOW, code >> UNIT_SHIFT
            end = ends[need[low] + unit]
            if end is None:
                waiting[need[low] + unit] = rank
                break
            arrival = end + lag[low]
            while rank.pending and rank.has_time(arrival, limit, eager):
                rank.run(rank.pending.popleft())
            rank.now = max(rank.now, arrival)
            rank.run(rank.order.popleft())
            slot = make[low] + unit
            ends[slot] = rank.now
            if slot in waiting:
                ready.append(waiting.pop(slot))
    for rank in ranks:
        rank.ops.extend(rank.pending)
    ops = tuple(rank.ops for rank in ranks)
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, ops)


class _Rank:
    """A rank whose weight gradients are being placed."""

    def __init__(self, ops: Sequence[int], table: tuple[tuple[Time, ...], ...]) -> None:
        self.ops = array("q")
        self.now: Time = 0
        self.order = deque(code for code in ops if code & KIND_MASK != Kind.W)
        """What is left to run besides weight gradients."""
        self.pending: deque[int] = deque()
        """Weight gradients that could run."""
        self._table = table
        self._held = 0

    def has_time(self, arrival: Time, limit: int, eager: bool) -> bool:
        """Whether a weight gradient goes before the next operation, whose input comes then."""
        if self.now + self._time(self.pending[0]) <= arrival or (eager and self.now < arrival):
            return True
        return self._held >= limit and self.order[0] & KIND_MASK == Kind.F

    def run(self, code: int) -> None:
        """Run an operation now."""
        kind = code & KIND_MASK
        self.ops.append(code)
        self.now += self._time(code)
        if kind == Kind.F:
            self._held += 1
        elif kind == Kind.I:
            self.pending.append(code - Kind.I + Kind.W)
        else:
            self._held -= 1

    def _time(self, code: int) -> Time:
        return self._table[code & KIND_MASK][code >> STAGE_SHIFT & STAGE_MASK]


def _plain(schedule: Schedule) -> Edges:
    """The tables of a schedule; ScheduleError if it has more than this file can move."""
    edges = Edges(schedule)
    joined = any(ops and max(ops) >= JOINED for ops in schedule.ops)
    if not edges.plain or schedule.sizes or schedule.recompute or joined or schedule.forward_only:
        raise ScheduleError(
            f"schedule {schedule.name}: only schedules of whole micro-batches with one replica, "
            "without slices, recomputation and joined operations can be reordered"
        )
    return edges
