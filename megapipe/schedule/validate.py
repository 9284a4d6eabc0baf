"""The proof that a schedule is complete and can be executed.

Two passes, each linear in the number of operations. The first reads each rank's list alone
(:mod:`megapipe.schedule.lists`). The second runs all lists against each other: F(s) needs F(s-1),
and I(s) or B(s) needs I(s+1) or B(s+1). Two joined operations are one, that needs both inputs and
makes both outputs. If a rank is left waiting, the operations that wait for each other are named.

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
from dataclasses import dataclass

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.edges import LOW, UNIT_SHIFT, UNITS, Edges
from megapipe.schedule.ir import JOINED, Kind, Op, Schedule
from megapipe.schedule.lists import read
from megapipe.schedule.refusal import BIT, deadlock
from megapipe.schedule.wavefront import Wavefront

_SPLIT = BIT[Kind.F] | BIT[Kind.I] | BIT[Kind.W]
_FUSED = BIT[Kind.F] | BIT[Kind.B]
_R = BIT[Kind.R]


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
    reading = read(edges)
    _check_complete(edges, reading.seen.tobytes())
    _run(edges, [edges.tokens(rank) for rank in range(schedule.placement.ranks)])
    return Report(
        ops=sum(len(ops) for ops in schedule.ops),
        bitwise_order=reading.ascending,
        peak_held=reading.peaks,
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


def _check_complete(edges: Edges, state: bytes) -> None:
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
    made = array("b", [-1]) * edges.slots
    made[edges.always : edges.nothing] = array("b", bytes(edges.units))
    cursor = [0] * len(lists)
    if Wavefront.suits(edges, lists):
        front, filled = Wavefront(edges, lists), np.frombuffer(made, np.int8)
        for _, places, _ in front.rounds(filled):
            filled[front.make[places]] = 0
        cursor = [front.done(rank) for rank in range(len(lists))]
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
            if made[slot] >= 0 and token >= JOINED:
                slot = edges.needed(tokens[index + 1])
            if made[slot] < 0:
                waiting[slot] = rank
                break
            slot = make_base[low] + unit
            made[slot] = 0
            if slot in waiting:
                ready.append(waiting.pop(slot))
            index += 1
        cursor[rank] = index
    if waiting:
        raise deadlock(edges, cursor, waiting)
