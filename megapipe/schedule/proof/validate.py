"""The proof that a schedule is complete and can be executed.

Two passes, each linear in the number of operations, and one more for updates within a schedule
(:mod:`megapipe.schedule.proof.updates`). The first reads each rank's list alone
(:mod:`megapipe.schedule.proof.lists`). The second runs all lists against each other: F(s) needs
F(s-1), and I(s) or B(s) needs I(s+1) or B(s+1). Two joined operations are one, that needs both
inputs and makes both outputs. If a rank is left waiting, the error names the operations that wait
for each other.

If no rank is left waiting, that also proves the communication of :mod:`megapipe.schedule.lower`:
one FIFO channel per ordered pair of ranks, a send that completes only when its receive is posted,
no wait for a send before the end of the step.

1. A receive waits for nothing but its message. Before an operation a rank posts receives for the
   message n that the operation needs and for earlier ones of the channel; the sender has posted all
   of them when it posts n, directly after the operation that makes n. So the only waits of the
   programs are the edges of the second pass.
2. No send is left over: every message has a consumer (first pass), and every receive is posted
   before its consumer runs (second pass), so all sends have completed at the end of the step.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.dependencies import LOW, PIECE_SHIFT, PIECES, Dependencies
from megapipe.schedule.ir import JOINED, Kind, Op, Schedule
from megapipe.schedule.proof.lists import read
from megapipe.schedule.proof.updates import check_updates
from megapipe.schedule.proof.violations import BIT, deadlock
from megapipe.schedule.wavefront import Wavefront

_SPLIT = BIT[Kind.F] | BIT[Kind.I] | BIT[Kind.W]
_FUSED = BIT[Kind.F] | BIT[Kind.B]
_R = BIT[Kind.R]


@dataclass(frozen=True)
class Proof:
    """Properties of a schedule that was proved executable."""

    ops: int
    """Operations over all ranks."""
    bitwise_order: bool
    """At each stage both the I and B, and the W and B, run in ascending micro-batch order (slices
    of one in descending order), so gradients are summed in the order of any other such schedule
    of the same pieces on the same placement."""
    peak_held: tuple[int, ...]
    """Per rank, the most chunk activations alive at once, as :attr:`Schedule.activation_bound`
    counts them; 0 for a forward-only schedule, which keeps none."""


def validate(schedule: Schedule) -> Proof:
    """Prove that a schedule is complete, ordered, within its `activation_bound`, and free of
    deadlock.

    Raises:
        ScheduleError: the rank, the place in its list (from 0), the operation, and what is wrong.
    """
    _check_recompute(schedule)
    dependencies = Dependencies(schedule)
    reading = read(dependencies)
    if schedule.updates is not None:
        check_updates(schedule, schedule.updates)
    _check_complete(dependencies, reading.seen.tobytes())
    _run(dependencies, [dependencies.codes(rank) for rank in range(schedule.placement.ranks)])
    return Proof(
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


def _check_complete(dependencies: Dependencies, state: bytes) -> None:
    schedule = dependencies.schedule
    whole = (BIT[Kind.F],) if schedule.forward_only else (_SPLIT, _FUSED, _SPLIT | _R, _FUSED | _R)
    flows = (
        dependencies.flow_of * schedule.microbatches
        if len(dependencies.flows) == 1
        else dependencies.flow_of
    )
    if len(dependencies.flows) == 1 and sum(state.count(value) for value in whole) == len(state):
        return
    for microbatch, flow in enumerate(flows):
        for stage in range(dependencies.stages):
            for part in range(schedule.slices):
                node = flow * dependencies.stages + stage
                value = state[node * dependencies.pieces + microbatch * schedule.slices + part]
                if value in whole:
                    continue
                if not value:
                    missing = str(Op(Kind.F, stage, microbatch, part))
                elif value & BIT[Kind.I]:
                    missing = str(Op(Kind.W, stage, microbatch, part))
                else:
                    missing = f"{Op(Kind.B, stage, microbatch, part)} (or an I and a W)"
                rank = dependencies.rank_of(dependencies.flows[flow], stage)
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {rank}: {missing} is missing from its list "
                    f"of {len(schedule.ops[rank])} operations"
                )


def _run(dependencies: Dependencies, lists: list["array[int]"]) -> None:
    """Run every list as far as it goes; a rank that waits is woken by what it waits for."""
    need_base, make_base = dependencies.base
    made = array("b", [-1]) * dependencies.slots
    made[dependencies.always : dependencies.nothing] = array("b", bytes(dependencies.pieces))
    cursor = [0] * len(lists)
    if Wavefront.suits(dependencies, lists):
        front, filled = Wavefront(dependencies, lists), np.frombuffer(made, np.int8)
        for _, places, _ in front.rounds(filled):
            filled[front.make[places]] = 0
        cursor = [front.done(rank) for rank in range(len(lists))]
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        codes = lists[rank]
        index, end = cursor[rank], len(codes)
        while index < end:
            code = codes[index]
            low, piece = code & LOW, code >> PIECE_SHIFT & PIECES
            slot = need_base[low] + piece
            if made[slot] >= 0 and code >= JOINED:
                slot = dependencies.needed(codes[index + 1])
            if slot >= dependencies.totals:
                missing = (s for s in dependencies.gradients_of(code) if made[s] < 0)
                slot = next(missing, dependencies.always)
            if made[slot] < 0:
                waiting.setdefault(slot, []).append(rank)
                break
            slot = make_base[low] + piece
            made[slot] = 0
            if slot in waiting:
                ready += waiting.pop(slot)
            index += 1
        cursor[rank] = index
    if waiting:
        raise deadlock(dependencies, cursor, waiting)
