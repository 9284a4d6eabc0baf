"""The proof that a schedule is complete and can be executed.

Two passes, each linear in the number of operations. The first reads each rank's list alone: every
(stage, micro-batch, slice) has exactly one F and one B, or one F, one I and one W, in that order,
on the rank that holds the stage for the micro-batch's replica; slices go forward in order and
backward in reverse; an R is between F and I (or B), at a stage that recomputes. The second runs
all lists against each other: F(s) needs F(s-1), and I(s) or B(s) needs I(s+1) or B(s+1). Two
joined operations are one, that needs both inputs and makes both outputs. If a rank is left
waiting, the operations that wait for each other are named.

That the second pass ends also proves the communication that :mod:`megapipe.schedule.lower` posts:
one FIFO channel per ordered pair of ranks, a send that completes only when its receive is posted,
no wait for a send before the end of the step.

1. A receive waits for nothing but its message: of the messages posted with message n of a channel,
   all come earlier in the channel, so the sender has posted them when it posts n, directly after
   the operation that makes it. So the only waits of the programs are the edges of the second pass.
2. No send is left over: every message has a consumer (first pass), and every receive is posted
   before its consumer runs (second pass), so all sends have completed at the end of the step.
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megapipe.errors import ScheduleError
from megapipe.schedule.edges import LOW, UNIT_SHIFT, UNITS, Edges
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_SHIFT, Kind, Op, Schedule, unpack
from megapipe.schedule.refusal import (
    BIT,
    deadlock,
    error,
    misplaced,
    out_of_order,
    over,
    slice_out_of_order,
)

_R = BIT[Kind.R]
_BACK = BIT[Kind.I] | BIT[Kind.B]
_SPLIT = BIT[Kind.F] | BIT[Kind.I] | BIT[Kind.W]
_FUSED = BIT[Kind.F] | BIT[Kind.B]


@dataclass(frozen=True)
class Report:
    """What was proved of a schedule, besides that it can be executed."""

    ops: int
    """Operations over all ranks."""
    bitwise_order: bool
    """At each stage both the I and B, and the W and B, run in ascending micro-batch order (slices
    of one in descending order), so gradients are summed in the order of any other such schedule
    of the same pieces on the same placement."""
    peak_held: tuple[int, ...]
    """Per rank, the most chunk activations alive at once, as :attr:`Schedule.held_limit` counts
    them; 0 for a forward-only schedule, which keeps none."""


def validate(schedule: Schedule) -> Report:
    """Prove that a schedule is complete, ordered, within its promise, and free of deadlock.

    Raises:
        ScheduleError: the rank, the place in its list (from 0), the operation, and what is wrong.
    """
    _check_recompute(schedule)
    edges = Edges(schedule)
    if not edges.plain:
        _check_ranges(schedule)
    tokens = [edges.tokens(rank) for rank in range(schedule.placement.ranks)]
    state = bytearray(edges.nodes * edges.units)
    rows = _rows(edges)
    scans = [
        _read_list(edges, rank, tokens[rank], rows[rank], state) for rank in range(len(tokens))
    ]
    _check_complete(edges, state)
    _run(edges, tokens)
    return Report(
        ops=sum(len(ops) for ops in schedule.ops),
        bitwise_order=all(ascending for _, ascending in scans),
        peak_held=tuple(peak for peak, _ in scans),
    )


def _check_recompute(schedule: Schedule) -> None:
    stages = schedule.placement.stages
    wrong = [stage for stage in schedule.recompute if not 0 <= stage < stages]
    if wrong:
        raise ScheduleError(
            f"schedule {schedule.name}: recompute names stage {wrong[0]}; stages go from 0 to "
            f"{stages - 1}"
        )
    if schedule.recompute and schedule.slices > 1:
        raise ScheduleError(
            f"schedule {schedule.name}: recomputation together with {schedule.slices} slices is "
            "not supported; use slices=1 or no recompute"
        )


def _check_ranges(schedule: Schedule) -> None:
    """Every operation's numbers are in range, so that it has a token."""
    stages, microbatches, slices = (
        schedule.placement.stages,
        schedule.microbatches,
        schedule.slices,
    )
    for rank, ops in enumerate(schedule.ops):
        for index, code in enumerate(ops):
            if 0 <= code < 2 * JOINED and code & KIND_MASK <= Kind.R:
                op = unpack(code)
                if op.stage < stages and op.microbatch < microbatches and op.slice < slices:
                    continue
            raise misplaced(schedule, rank, index)


def _rows(edges: Edges) -> list[dict[int, int]]:
    """Per rank, the row of states of every operation that has a place there, by low part."""
    schedule = edges.schedule
    rows: list[dict[int, int]] = [{} for _ in schedule.ops]
    for low, kind, lane, stage in edges.by_low():
        if schedule.forward_only and kind != Kind.F:
            continue
        if kind != Kind.R or stage in schedule.recompute:
            rows[edges.rank_of(lane, stage)][low] = (low >> STAGE_SHIFT) * edges.units
    return rows


def _read_list(
    edges: Edges, rank: int, tokens: Iterable[int], rows: dict[int, int], state: bytearray
) -> tuple[int, bool]:
    """Check one rank's list alone; its peak, and whether its gradients are in order.

    state[node * units + unit] collects the bits of the kinds seen so far; last[row] is the place,
    in the order of sums, of the stage's last input gradient and last weight gradient.
    """
    schedule, units, slices = edges.schedule, edges.units, edges.schedule.slices
    limit = None if schedule.held_limit is None else schedule.held_limit[rank]
    recomputed = {row for low, row in rows.items() if low & KIND_MASK == Kind.R}
    last_of_stage: dict[int, list[int]] = defaultdict(lambda: [-1, -1])
    last = {row: last_of_stage[row // units % edges.stages] for row in rows.values()}
    held = peak = 0
    ascending = True
    for index, token in enumerate(tokens):
        row = rows.get(token & LOW, -1)
        unit = token >> UNIT_SHIFT & UNITS
        if row < 0 or unit >= units or token < 0:
            raise misplaced(schedule, rank, index)
        if token >= JOINED:
            _check_joined(schedule, rank, index)
        kind = token & KIND_MASK
        slot = row + unit
        seen = state[slot]
        place = unit if slices == 1 else unit + slices - 1 - unit % slices * 2
        if kind == 0:  # F
            if seen:
                raise out_of_order(schedule, rank, index, seen)
            state[slot] = 1
            if slices > 1 and unit % slices and not state[slot - 1]:
                raise slice_out_of_order(edges, rank, index)
            if schedule.forward_only or row in recomputed:
                continue
            held += 1
            if held > peak:
                peak = held
                if limit is not None and held > limit:
                    raise over(schedule, rank, index, held, limit)
            continue
        if kind == 4:  # R
            if seen != 1:
                raise out_of_order(schedule, rank, index, seen)
            state[slot] = 1 | _R
            held += 1
        elif kind != 3:  # B or I: the input gradient is there
            if seen | _R != 1 | _R:
                raise out_of_order(schedule, rank, index, seen)
            if slices > 1 and (unit + 1) % slices and not state[slot + 1] & _BACK:
                raise slice_out_of_order(edges, rank, index)
            if place < last[row][0]:
                ascending = False
            last[row][0] = place
            if seen == 1 and row in recomputed:
                held += 1
            state[slot] = seen | (8 if kind == 1 else 2)
        elif seen & 15 != 3:
            raise out_of_order(schedule, rank, index, seen)
        if held > peak:
            peak = held
            if limit is not None and held > limit:
                raise over(schedule, rank, index, held, limit)
        if kind == 3 or kind == 1:  # W or B: the activation is free
            if kind == 3:
                state[slot] = seen | 4
            held -= 1
            if place < last[row][1]:
                ascending = False
            last[row][1] = place
    return peak, ascending


def _check_joined(schedule: Schedule, rank: int, index: int) -> None:
    ops = schedule.ops[rank]
    if ops[index] >> 61:
        raise misplaced(schedule, rank, index)
    if index + 1 == len(ops):
        raise error(schedule, rank, index, "it is joined with the next operation; it is the last")
    after = unpack(ops[index + 1])
    if after.joined:
        raise error(
            schedule, rank, index, f"it is joined with {after}, which is joined with another again"
        )
    if after.microbatch == unpack(ops[index]).microbatch:
        raise error(
            schedule, rank, index, f"it is joined with {after}, which is of the same micro-batch"
        )


def _check_complete(edges: Edges, state: bytearray) -> None:
    schedule = edges.schedule
    whole = (BIT[Kind.F],) if schedule.forward_only else (_SPLIT, _FUSED, _SPLIT | _R, _FUSED | _R)
    lanes = edges.lane_of * schedule.microbatches if len(edges.lanes) == 1 else edges.lane_of
    if len(edges.lanes) == 1 and sum(state.count(value) for value in whole) == len(state):
        return
    for microbatch, lane in enumerate(lanes):
        for stage in range(edges.stages):
            for part in range(schedule.slices):
                node = lane * edges.stages + stage
                value = state[node * edges.units + microbatch * schedule.slices + part]
                if value in whole:
                    continue
                if not value:
                    missing = str(Op(Kind.F, stage, microbatch, part))
                elif value & BIT[Kind.I]:
                    missing = str(Op(Kind.W, stage, microbatch, part))
                else:
                    missing = f"{Op(Kind.B, stage, microbatch, part)} (or an I and a W)"
                rank = edges.rank_of(edges.lanes[lane], stage)
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {rank}: {missing} is missing from its list "
                    f"of {len(schedule.ops[rank])} operations"
                )


def _run(edges: Edges, lists: list["array[int]"]) -> None:
    """Run every list as far as it goes; a rank that waits is woken by what it waits for."""
    need_base, make_base = edges.base
    made = bytearray(edges.slots)
    made[edges.always : edges.always + edges.units] = b"\1" * edges.units
    cursor = [0] * len(lists)
    waiting: dict[int, int] = {}
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        tokens = lists[rank]
        index, end = cursor[rank], len(tokens)
        while index < end:
            token = tokens[index]
            low, unit = token & LOW, token >> UNIT_SHIFT & UNITS
            slot = need_base[low] + unit
            if made[slot] and token >= JOINED:
                slot = edges.needed(tokens[index + 1])
            if not made[slot]:
                waiting[slot] = rank
                break
            slot = make_base[low] + unit
            made[slot] = 1
            if slot in waiting:
                ready.append(waiting.pop(slot))
            index += 1
        cursor[rank] = index
    if waiting:
        raise deadlock(edges, cursor, waiting)
