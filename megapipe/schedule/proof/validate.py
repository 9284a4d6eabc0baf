"""The proof that a schedule is complete and can be executed.

It has two passes, each linear in the number of operations, and one more for the updates of a
no-flush schedule (:mod:`megapipe.schedule.proof.updates`). The first reads each rank's list alone
(:mod:`megapipe.schedule.proof.rank_lists`). The second runs all lists against each other: F(s)
needs F(s-1), and I(s) or B(s) needs I(s+1) or B(s+1). A joined pair counts as one operation with
both inputs and both outputs. An operation of a spanning stage also needs every rank to have come to
it. If a rank is left waiting, the error names the operations that wait for each other.

If no rank is left waiting, the programs of :mod:`megapipe.schedule.lower` cannot deadlock either.
They have one FIFO channel per ordered pair of ranks, a send completes only when its receive is
posted, and no rank waits for a send before the end of the step.

1. A receive waits only for its message. Before an operation a rank posts receives for the
   message n that the operation needs and for earlier ones of the channel; the sender has posted all
   of them when it posts n, directly after the operation that makes n. So the programs wait only for
   what the second pass has checked.
2. No send is left over: every message has a consumer (first pass), and every receive is posted
   before its consumer runs (second pass), so all sends have completed at the end of the step.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, Kind, Op, Schedule
from megapipe.schedule.proof.rank_lists import read
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
    """Number of operations over all ranks."""
    bitwise_order: bool
    """Whether at each stage I and B, and also W and B, run in ascending micro-batch order (slices
    of a micro-batch in descending order). Then gradients are summed in the same order as in any
    other such schedule with the same work items and placement."""
    peak_held: tuple[int, ...]
    """Maximum number of activations alive at once per rank, as :attr:`Schedule.activation_bound`
    counts them; 0 for a forward-only schedule."""


def validate(schedule: Schedule) -> Proof:
    """Prove that a schedule is complete, ordered, within `activation_bound`, and free of deadlock.

    Raises:
        ScheduleError: it names rank, index in the list (from 0), operation and reason.
    """
    _check_recompute(schedule)
    dependencies = Dependencies(schedule)
    reading = read(dependencies)
    if schedule.updates is not None:
        check_updates(schedule, schedule.updates)
    _check_complete(dependencies, reading.seen.tobytes())
    if schedule.placement.spanning:
        _check_alike(dependencies, reading.seen.tobytes())
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
        for node, stage, rank in dependencies.nodes_of(flow):
            for part in range(schedule.slices):
                value = state[node * dependencies.work_items + microbatch * schedule.slices + part]
                if value in whole:
                    continue
                if not value:
                    missing = str(Op(Kind.F, stage, microbatch, part))
                elif value & BIT[Kind.I]:
                    missing = str(Op(Kind.W, stage, microbatch, part))
                else:
                    missing = f"{Op(Kind.B, stage, microbatch, part)} (or an I and a W)"
                raise ScheduleError(
                    f"schedule {schedule.name}: rank {rank}: {missing} is missing from its list "
                    f"of {len(schedule.ops[rank])} operations"
                )


def _check_alike(dependencies: Dependencies, state: bytes) -> None:
    """Check that the backward of a spanning stage is fused on all ranks or split on all ranks."""
    items, schedule = dependencies.work_items, dependencies.schedule
    for node, stage, rank in dependencies.nodes_of(0):
        if stage not in schedule.placement.spanning:
            continue
        for microbatch in range(items):
            first, own = state[stage * items + microbatch], state[node * items + microbatch]
            if first != own:
                back = [
                    Op(Kind.B if bits & BIT[Kind.B] else Kind.I, stage, microbatch)
                    for bits in (first, own)
                ]
                raise ScheduleError(
                    f"schedule {schedule.name}: stage {stage} spans all ranks, but rank 0 has "
                    f"{back[0]} and rank {rank} has {back[1]}"
                )


def _run(dependencies: Dependencies, lists: list["array[int]"]) -> None:
    """Run all lists against each other; raise ScheduleError if a rank is left waiting."""
    need_base, make_base = dependencies.base
    made = array("b", [-1]) * dependencies.slots
    made[dependencies.always : dependencies.nothing] = array("b", bytes(dependencies.work_items))
    cursor = [0] * len(lists)
    if Wavefront.suits(dependencies, lists):
        front, filled = Wavefront(dependencies, lists), np.frombuffer(made, np.int8)
        for _, indices, _ in front.rounds(filled):
            filled[front.make[indices]] = 0
        cursor = [front.done(rank) for rank in range(len(lists))]
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        codes = lists[rank]
        index, end = cursor[rank], len(codes)
        while index < end:
            code = codes[index]
            low, item = code & LOW, code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
            result = need_base[low] + item
            if made[result] >= 0 and code >= JOINED:
                result = dependencies.needed(codes[index + 1])
            if result >= dependencies.totals:
                if low in dependencies.together:
                    arrival = dependencies.arrival(code, rank)
                    made[arrival] = 0
                    ready += waiting.pop(arrival, ())
                missing = (r for r in dependencies.inputs_of(code) if made[r] < 0)
                result = next(missing, dependencies.always)
            if made[result] < 0:
                waiting.setdefault(result, []).append(rank)
                break
            result = make_base[low] + item
            made[result] = 0
            if result in waiting:
                ready += waiting.pop(result)
            index += 1
        cursor[rank] = index
    if waiting:
        raise deadlock(dependencies, cursor, waiting)
