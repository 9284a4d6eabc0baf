"""Shorten schedules at the same peak memory: move operations into idle time.

:func:`compact` assumes equal times and moves all kinds of operations; a steady state without idle
slots stays as it is. :func:`refill` moves only weight gradients, at any times. Together they are
the last step of the building-block method (Qi et al., 2405.15362). Each works on any schedule with
one direction and whole micro-batches and sequences, whose operations are F and B, or F, I and W.
"""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.dependencies import LOW, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, Kind, Schedule, packed
from megapipe.schedule.memory import most_held
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.timing.simulate import Timeline, simulate
from megapipe.schedule.timing.ticks import room
from megapipe.schedule.timing.times import in_ticks


def reorder(schedule: Schedule, cost: Cost | None = None) -> Schedule:
    """Apply :func:`compact`, and :func:`refill` as if all operations took equally long; then
    :func:`refill` with the times of `cost`, if given. The schedule must be valid; this is not
    checked."""
    schedule = refill_valid(compact(schedule), Cost())
    return refill_valid(schedule, cost) if cost else schedule


def compact(schedule: Schedule) -> Schedule:
    """Move operations ahead into idle time slots; F, I and W take one slot and B two.

    Operations move one by one, in the order of their starts. Each takes the first idle slots of its
    rank after its inputs and after the previous operation of the same kind and stage. A forward
    stops where its rank's activations would exceed the original schedule's peak over all ranks. So
    no operation gets later, the peak does not rise, and a steady state without idle slots stays as
    it is. The schedule must be valid; this is not checked.

    Raises:
        ScheduleError: the schedule has several directions, slices, split micro-batches,
            recomputation or joined operations, or no backwards.
    """
    dependencies = _plain(schedule)
    need, make = dependencies.base
    limit = max(map(most_held, schedule.ops))
    timeline = simulate(schedule)
    starts = cast("tuple[Sequence[int], ...]", timeline.starts)  # integers, as the costs are
    ends = cast("tuple[Sequence[int], ...]", timeline.ends)
    rows = [_RankSlots(*row) for row in zip(starts, ends, schedule.ops, strict=True)]
    cells = sorted(
        (start, rank, code, end - start)
        for rank, row in enumerate(zip(starts, ends, schedule.ops, strict=True))
        for start, end, code in zip(*row, strict=True)
    )
    made = [0] * dependencies.slots
    before: dict[int, int] = {}
    moved: list[list[tuple[int, int]]] = [[] for _ in rows]
    for start, rank, code, slots in cells:
        kind, low, item = code & KIND_MASK, code & LOW, code >> WORK_ITEM_SHIFT
        ready = max(made[need[low] + item], before.get(low, 0))
        if kind == Kind.W:
            ready = max(ready, made[make[low - Kind.W + Kind.I] + item])
        elif kind != Kind.F:
            ready = max(ready, made[make[low - kind + Kind.F] + item])
        if ready < start:
            start = rows[rank].move(kind, start, slots, ready, limit)
        before[low] = made[make[low] + item] = start + slots
        moved[rank].append((start, code))
    ops = tuple(packed(code for _, code in sorted(row)) for row in moved)
    return Schedule(schedule.name, schedule.placement, schedule.microbatches, ops)


class _RankSlots:
    """Time slots of one rank: which slots are taken, and how many activations are alive in each."""

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
        """Move an operation from slot `start` to the first idle slots from `ready` on; return its
        new start. A forward moves only through slots with fewer than `limit` activations."""
        first = ready
        if kind == Kind.F:
            first = start
            while first > ready and self.held[first - 1] < limit:
                first -= 1
        self.taken[start : start + slots] = bytes(slots)
        begin = self.taken.find(bytes(slots), first)
        self.taken[begin : begin + slots] = b"\1" * slots
        if kind == Kind.F:
            for slot in range(begin, start):
                self.held[slot] += 1
        elif kind != Kind.I:
            for slot in range(begin + slots, start + slots):
                self.held[slot] -= 1
        return begin


def refill(schedule: Schedule, cost: Cost | None = None) -> Schedule:
    """Move weight gradients to where their rank would idle; other operations keep their order.

    A rank runs a W in three cases: the W ends before the input of the next operation arrives; the
    next forward would exceed the original schedule's peak over all ranks; or only W are left. In a
    second attempt an idle rank also starts a W that ends after the next input arrives. The result
    is the original schedule or an attempt: the one with the smallest makespan, in a tie the one
    whose longest span of a rank is shortest. A rank's W run in the order of its I.

    Raises:
        ScheduleError: the schedule cannot be executed; or it has several directions, slices, split
            micro-batches, recomputation or joined operations, or no backwards.
    """
    validate(schedule)
    return refill_valid(schedule, cost or Cost())


class _Attempt(NamedTuple):
    """A schedule, its makespan, and the longest span of a rank."""

    schedule: Schedule
    makespan: Time
    span: Time


def refill_valid(schedule: Schedule, cost: Cost) -> Schedule:
    """Apply :func:`refill` to a schedule that must be valid; this is not checked."""
    dependencies = _plain(schedule)
    cost, _ = in_ticks(schedule.placement, cost)
    if not any(code & KIND_MASK == Kind.W for ops in schedule.ops for code in ops):
        return schedule
    timeline = simulate(schedule, cost)
    if _cannot_be_shorter(timeline):
        return schedule
    unchanged = _timed(timeline)
    del timeline  # frees memory: it is as large as both attempts
    limit = max(map(most_held, schedule.ops))
    attempts = [_refilled(dependencies, cost, limit, eager) for eager in (False, True)]
    if not _as_simulated(schedule, cost):
        attempts = [_timed(simulate(attempt.schedule, cost)) for attempt in attempts]
    return min((unchanged, *attempts), key=lambda attempt: attempt[1:]).schedule


def _cannot_be_shorter(timeline: Timeline) -> bool:
    """Whether the schedule is as short as any order of weight gradients can make it: once
    started, the rank with the longest span and the rank that ends last never idle."""
    latest = max(
        starts[0] + busy
        for starts, busy in zip(timeline.starts, timeline.busy, strict=True)
        if starts
    )
    return max(timeline.spans) == max(timeline.busy) and timeline.makespan == latest


def _timed(timeline: Timeline) -> _Attempt:
    return _Attempt(timeline.schedule, timeline.makespan, max(timeline.spans))


def _as_simulated(schedule: Schedule, cost: Cost) -> bool:
    """Whether :func:`_refilled` computes the same times as the simulator, at this cost."""
    stages = schedule.placement.stages
    besides = (*cost.per_stage("reduce", stages), *cost.per_stage("gather", stages))
    return cost.overlap and not (cost.jitter or cost.slices or any(besides))


def _refilled(dependencies: Dependencies, cost: Cost, limit: int, eager: bool) -> _Attempt:
    """Make one attempt of :func:`refill`, in ticks, with messages that overlap with computation.

    No rank has more than `limit` activations. If `eager`, an idle rank also starts a W that ends
    after the next input arrives.
    """
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
            low, item = code & LOW, code >> WORK_ITEM_SHIFT
            arrival = ends[need[low] + item]
            if arrival < 0:
                waiting[need[low] + item] = rank
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
            slot = make[low] + item
            ends[slot] = now
            if slot in waiting:
                ready.append(waiting.pop(slot))
        rank.now, rank.held, rank.index, rank.made, rank.done = now, held, index, made, done
    starts = []
    for rank, listed in zip(ranks, schedule.ops, strict=True):
        for weight in rank.weights[rank.done :]:
            rank.ops.append(weight)
            rank.now += length[weight & LOW]
        low = listed[0] & LOW
        starts.append(ends[need[low] + (listed[0] >> WORK_ITEM_SHIFT)] + lag[low])
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
        """All operations except weight gradients, in their order."""
        self.weights = array("q", (codes[kinds == Kind.I] - Kind.I + Kind.W).tobytes())
        """Weight gradients, in the order of the rank's I."""
        self.now: Time = 0
        self.held = self.index = 0
        """Number of activations alive, and number of operations of `order` that have run."""
        self.made = self.done = 0
        """Number of I that have run, and number of W that have run."""


def _plain(schedule: Schedule) -> Dependencies:
    """Return the dependencies of a schedule. Raises ScheduleError if it cannot be reordered."""
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
