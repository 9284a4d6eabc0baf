"""Shorter orders at the same peak: operations move into the gaps of a schedule.

:func:`compact` moves whatever fits, at equal times, and leaves a steady state without gaps as it
is. :func:`refill` moves weight gradients alone, at any times. Together they are the last step of
the building-block method (Qi et al., 2405.15362); each works on any schedule with one direction
whose operations are F with B, or F, I and W, of whole sequences.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.dependencies import LOW, PIECE_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, Kind, Schedule, packed
from megapipe.schedule.memory import most_held
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import Timeline, simulate
from megapipe.schedule.timing.ticks import room
from megapipe.schedule.timing.times import in_ticks


def reorder(schedule: Schedule, cost: Cost | None = None) -> Schedule:
    """:func:`compact` and :func:`refill` at equal times, then :func:`refill` at the given cost; of
    a schedule that is known to be valid, as it is not proved again."""
    schedule = refill_valid(compact(schedule), Cost())
    return refill_valid(schedule, cost) if cost else schedule


def compact(schedule: Schedule) -> Schedule:
    """Move operations ahead into idle slots, where F, I and W take one slot and B two.

    In the order of their starts, each operation takes the first idle slots of its rank after its
    inputs and after the one before of its kind and stage; a forward only as far ahead as the rank
    then holds no more than any rank of the given schedule did. So no operation gets later, the
    peak does not rise, and a steady state without idle slots stays what it is. The schedule must be
    valid.

    Raises:
        ScheduleError: the schedule is not of the plain form.
    """
    dependencies = _plain(schedule)
    need, make = dependencies.base
    limit = max(map(most_held, schedule.ops))
    timeline = simulate(schedule)
    starts = cast("tuple[Sequence[int], ...]", timeline.starts)  # whole, as the costs are
    ends = cast("tuple[Sequence[int], ...]", timeline.ends)
    rows = [_Row(*row) for row in zip(starts, ends, schedule.ops, strict=True)]
    cells = sorted(
        (start, rank, code, end - start)
        for rank, row in enumerate(zip(starts, ends, schedule.ops, strict=True))
        for start, end, code in zip(*row, strict=True)
    )
    made = [0] * dependencies.slots
    before: dict[int, int] = {}
    moved: list[list[tuple[int, int]]] = [[] for _ in rows]
    for start, rank, code, slots in cells:
        kind, low, piece = code & KIND_MASK, code & LOW, code >> PIECE_SHIFT
        ready = max(made[need[low] + piece], before.get(low, 0))
        if kind == Kind.W:
            ready = max(ready, made[make[low - Kind.W + Kind.I] + piece])
        elif kind != Kind.F:
            ready = max(ready, made[make[low - kind + Kind.F] + piece])
        if ready < start:
            start = rows[rank].move(kind, start, slots, ready, limit)
        before[low] = made[make[low] + piece] = start + slots
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
    validate(schedule)
    return refill_valid(schedule, cost or Cost())


class _Attempt(NamedTuple):
    """A schedule, its makespan and its longest span."""

    schedule: Schedule
    makespan: Time
    span: Time


def refill_valid(schedule: Schedule, cost: Cost) -> Schedule:
    """:func:`refill` of a schedule that is known to be valid, as it is not proved again."""
    dependencies = _plain(schedule)
    cost, _ = in_ticks(schedule.placement, cost)
    if not any(code & KIND_MASK == Kind.W for ops in schedule.ops for code in ops):
        return schedule
    timeline = simulate(schedule, cost)
    if _cannot_be_shorter(timeline):
        return schedule
    given = _timed(timeline)
    del timeline  # as large as both attempts
    limit = max(map(most_held, schedule.ops))
    attempts = [_refilled(dependencies, cost, limit, eager) for eager in (False, True)]
    if not _as_simulated(schedule, cost):
        attempts = [_timed(simulate(attempt.schedule, cost)) for attempt in attempts]
    return min((given, *attempts), key=lambda attempt: attempt[1:]).schedule


def _cannot_be_shorter(timeline: Timeline) -> bool:
    """No rank waits once it has begun, of those that take longest and of those that end last; and
    when a rank begins does not depend on weight gradients."""
    latest = max(
        starts[0] + busy
        for starts, busy in zip(timeline.starts, timeline.busy, strict=True)
        if starts
    )
    return max(timeline.spans) == max(timeline.busy) and timeline.makespan == latest


def _timed(timeline: Timeline) -> _Attempt:
    return _Attempt(timeline.schedule, timeline.makespan, max(timeline.spans))


def _as_simulated(schedule: Schedule, cost: Cost) -> bool:
    """Whether the times of :func:`_refilled` are those of the simulator."""
    stages = schedule.placement.stages
    besides = (*cost.per_stage("reduce", stages), *cost.per_stage("gather", stages))
    return cost.overlap and not (cost.jitter or cost.slices or any(besides))


def _refilled(dependencies: Dependencies, cost: Cost, limit: int, eager: bool) -> _Attempt:
    """One attempt, at times in ticks, with messages that travel while ranks compute."""
    schedule = dependencies.schedule
    need, make = dependencies.base
    table = cost.table(dependencies.stages)
    length: list[Time] = [0] * len(need)
    for low, what, _, stage in dependencies.by_low():
        length[low] = table[what][stage]
    lag = [0 if edge is None else cost.link(*edge) for edge in dependencies.incoming]
    operations = sum(map(len, schedule.ops))
    ends = room(-1, dependencies.slots, (sum(length) + sum(lag)) * operations)
    for slot in dependencies.always_ready:
        ends[slot] = 0
    ranks = [_Rank(ops) for ops in schedule.ops]
    waiting: dict[int, _Rank] = {}
    ready = list(ranks)
    while ready:
        rank = ready.pop()
        ops, order, weights = rank.ops, rank.order, rank.weights
        now, held, index, made, done = rank.now, rank.held, rank.index, rank.made, rank.done
        while index < len(order):
            code = order[index]
            low, piece = code & LOW, code >> PIECE_SHIFT
            arrival = ends[need[low] + piece]
            if arrival < 0:
                waiting[need[low] + piece] = rank
                break
            arrival += lag[low]
            kind = code & KIND_MASK
            while done < made:  # weight gradients that could run
                weight = weights[done]
                end = now + length[weight & LOW]
                late = end > arrival and not (eager and now < arrival)
                if late and (held < limit or kind != 0):
                    break
                ops.append(weight)
                now = end
                held -= 1
                done += 1
            if now < arrival:
                now = arrival
            ops.append(code)
            now += length[low]
            if kind == 0:  # F
                held += 1
            elif kind == 2:  # I
                made += 1
            else:
                held -= 1
            index += 1
            slot = make[low] + piece
            ends[slot] = now
            if slot in waiting:
                ready.append(waiting.pop(slot))
        rank.now, rank.held, rank.index, rank.made, rank.done = now, held, index, made, done
    starts = []
    for rank, given in zip(ranks, schedule.ops, strict=True):
        for weight in rank.weights[rank.done :]:
            rank.ops.append(weight)
            rank.now += length[weight & LOW]
        low = given[0] & LOW
        starts.append(ends[need[low] + (given[0] >> PIECE_SHIFT)] + lag[low])
    refilled = replace(schedule, ops=tuple(rank.ops for rank in ranks), activation_bound=None)
    return _Attempt(
        refilled,
        max(rank.now for rank in ranks) - min(starts),
        max(rank.now - start for rank, start in zip(ranks, starts, strict=True)),
    )


class _Rank:
    """A rank whose weight gradients are being placed."""

    def __init__(self, ops: Sequence[int]) -> None:
        self.ops = array("q")
        codes = np.array(ops, np.int64)
        kinds = codes & KIND_MASK
        self.order = array("q", codes[kinds != Kind.W].tobytes())
        """Operations that are left besides weight gradients."""
        self.weights = array("q", (codes[kinds == Kind.I] - Kind.I + Kind.W).tobytes())
        """In the order of their inputs."""
        self.now: Time = 0
        self.held = self.index = 0
        """Activations alive, and how much of `order` has run."""
        self.made = self.done = 0
        """How many weight gradients have their input, and how many have run."""


def _plain(schedule: Schedule) -> Dependencies:
    """The tables of a schedule; ScheduleError if it has more than this file can move."""
    dependencies = Dependencies(schedule)
    joined = any(ops and max(ops) >= JOINED for ops in schedule.ops)
    if (
        not dependencies.plain
        or schedule.sizes
        or schedule.recompute
        or joined
        or schedule.forward_only
    ):
        raise ScheduleError(
            f"schedule {schedule.name}: only schedules of whole micro-batches with one direction, "
            "without slices, recomputation and joined operations can be reordered"
        )
    return dependencies
