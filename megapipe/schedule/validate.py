"""The proof that a schedule is complete and can be executed.

Two passes, each linear in the number of operations. The first reads each rank's list alone: every
(stage, micro-batch) has exactly one F and one B, or one F, one I and one W, in that order, on the
rank that holds the stage. The second runs all lists against each other: F(s) needs F(s-1), and
I(s) or B(s) needs I(s+1) or B(s+1). If a rank is left waiting, the operations that wait for each
other are named.

That the second pass ends also proves the communication that :mod:`megapipe.schedule.lower` posts:
one FIFO channel per ordered pair of ranks, a send that completes only when its receive is posted,
no wait for a send before the end of the step.

1. A receive waits for nothing but its message: of the messages posted with message n of a channel,
   all come earlier in the channel, so the sender has posted them when it posts n, directly after
   the operation that makes it. So the only waits of the programs are the edges of the second pass.
2. No send is left over: every message has a consumer (first pass), and every receive is posted
   before its consumer runs (second pass), so all sends have completed at the end of the step.
"""

from dataclasses import dataclass

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import (
    KIND_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    Kind,
    Op,
    Schedule,
    unpack,
)

_BIT = {Kind.F: 1, Kind.I: 2, Kind.W: 4, Kind.B: 8}
_SPLIT = _BIT[Kind.F] | _BIT[Kind.I] | _BIT[Kind.W]
_FUSED = _BIT[Kind.F] | _BIT[Kind.B]


@dataclass(frozen=True)
class Report:
    """What was proved of a schedule, besides that it can be executed."""

    ops: int
    """Operations over all ranks."""
    bitwise_order: bool
    """At each stage both the I and B, and the W and B, run in ascending micro-batch order, so
    gradients are summed in the order of any other such schedule on the same placement."""
    peak_held: tuple[int, ...]
    """Per rank, the most chunk activations alive at once, each from its F to its W (or B); 0 for
    a forward-only schedule, which keeps none."""


def validate(schedule: Schedule) -> Report:
    """Prove that a schedule is complete, ordered, within its promise, and free of deadlock.

    Raises:
        ScheduleError: the rank, the place in its list (from 0), the operation, and what is wrong.
    """
    if len(schedule.placement.table) != 1:
        raise ScheduleError(
            f"schedule {schedule.name}: its placement has {len(schedule.placement.table)} "
            "replicas; only one is supported"
        )
    state = bytearray(schedule.placement.stages * schedule.microbatches)
    scans = [_read_list(schedule, rank, state) for rank in range(schedule.placement.ranks)]
    _check_complete(schedule, state)
    _run(schedule)
    return Report(
        ops=sum(len(ops) for ops in schedule.ops),
        bitwise_order=all(ascending for _, ascending in scans),
        peak_held=tuple(peak for peak, _ in scans),
    )


def _read_list(schedule: Schedule, rank: int, state: bytearray) -> tuple[int, bool]:
    """Check one rank's list alone; its peak, and whether its gradients are in order.

    state[stage * microbatches + microbatch] collects the bits of the kinds seen so far.
    """
    microbatches, stages = schedule.microbatches, schedule.placement.stages
    table = schedule.placement.table[0]
    limit = None if schedule.held_limit is None else schedule.held_limit[rank]
    kinds = 1 if schedule.forward_only else 4
    last_input, last_weight = [-1] * stages, [-1] * stages
    held = peak = 0
    ascending = True
    for index, code in enumerate(schedule.ops[rank]):
        kind = code & KIND_MASK
        stage = code >> STAGE_SHIFT & STAGE_MASK
        microbatch = code >> MICROBATCH_SHIFT  # with a slice or a flag it is out of range
        if not (
            kind < kinds
            and stage < stages
            and 0 <= microbatch < microbatches
            and table[stage] == rank
        ):
            raise _misplaced(schedule, rank, index)
        slot = stage * microbatches + microbatch
        seen = state[slot]
        if kind == 0:  # F
            if seen:
                raise _out_of_order(schedule, rank, index, seen)
            state[slot] = 1
            if kinds == 1:
                continue
            held += 1
            if held > peak:
                peak = held
                if limit is not None and held > limit:
                    raise _error(
                        schedule,
                        rank,
                        index,
                        f"{held} chunk activations are held from here, more than the "
                        f"{limit} promised for this rank",
                    )
            continue
        if kind != 2:  # B or W: the activation is free
            if seen != (1 if kind == 1 else 3):
                raise _out_of_order(schedule, rank, index, seen)
            held -= 1
            if microbatch < last_weight[stage]:
                ascending = False
            last_weight[stage] = microbatch
        if kind != 3:  # B or I: the input gradient is there
            if seen != 1:
                raise _out_of_order(schedule, rank, index, seen)
            if microbatch < last_input[stage]:
                ascending = False
            last_input[stage] = microbatch
        state[slot] = seen | (0, 8, 2, 4)[kind]
    return peak, ascending


def _check_complete(schedule: Schedule, state: bytearray) -> None:
    whole = (_BIT[Kind.F],) if schedule.forward_only else (_SPLIT, _FUSED)
    if sum(state.count(value) for value in whole) == len(state):
        return
    slot = next(slot for slot, value in enumerate(state) if value not in whole)
    stage, microbatch = divmod(slot, schedule.microbatches)
    rank = schedule.placement.rank_of(stage)
    if not state[slot]:
        missing = str(Op(Kind.F, stage, microbatch))
    elif state[slot] & _BIT[Kind.I]:
        missing = str(Op(Kind.W, stage, microbatch))
    else:
        missing = f"{Op(Kind.B, stage, microbatch)} (or an I and a W)"
    raise ScheduleError(
        f"schedule {schedule.name}: rank {rank}: {missing} is missing from its list of "
        f"{len(schedule.ops[rank])} operations"
    )


def _run(schedule: Schedule) -> None:
    """Run every list as far as it goes; a rank that waits is woken by what it waits for.

    The flags of finished operations form two tables of (stages + 2) rows of microbatches, one of
    forwards and one of input gradients; row stage + 1 is the stage's own, and the outer rows,
    always set, stand before the first and behind the last stage.
    """
    microbatches, stages = schedule.microbatches, schedule.placement.stages
    size = (stages + 2) * microbatches
    done = bytearray(2 * size)
    done[:microbatches] = done[-microbatches:] = b"\1" * microbatches
    cursor = [0] * len(schedule.ops)
    waiting: dict[int, int] = {}
    ready = list(range(len(schedule.ops)))
    while ready:
        rank = ready.pop()
        ops = schedule.ops[rank]
        index = cursor[rank]
        end = len(ops)
        while index < end:
            code = ops[index]
            kind = code & KIND_MASK
            if kind != 3:
                stage = code >> STAGE_SHIFT & STAGE_MASK
                mine = (stage + 1) * microbatches + (code >> MICROBATCH_SHIFT)
                if kind == 0:
                    need = mine - microbatches
                else:
                    mine += size
                    need = mine + microbatches
                if not done[need]:
                    waiting[need] = rank
                    break
                done[mine] = 1
                if mine in waiting:
                    ready.append(waiting.pop(mine))
            index += 1
        cursor[rank] = index
    if waiting:
        raise _deadlock(schedule, cursor, waiting, size)


def _deadlock(
    schedule: Schedule, cursor: list[int], waiting: dict[int, int], size: int
) -> ScheduleError:
    """Follow the waits from the first blocked rank until they close, and tell the circle."""
    wanted = {rank: need for need, rank in waiting.items()}
    rank = min(wanted)
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        stage = wanted[rank] % size // schedule.microbatches - 1
        rank = schedule.placement.rank_of(stage)
    circle = chain[chain.index(rank) :]
    parts = []
    for rank in circle:
        table, slot = divmod(wanted[rank], size)
        stage, microbatch = slot // schedule.microbatches - 1, slot % schedule.microbatches
        owner = schedule.placement.rank_of(stage)
        kinds = (Kind.F,) if table == 0 else (Kind.I, Kind.B)
        index, needed = next(
            (index, op)
            for index, op in enumerate(schedule.rank_ops(owner))
            if op.kind in kinds and (op.stage, op.microbatch) == (stage, microbatch)
        )
        parts.append(
            f"rank {rank} op {cursor[rank]} ({_name(schedule, rank, cursor[rank])}) waits for "
            f"{needed}, op {index} of rank {owner}"
        )
    shown = parts if len(parts) <= 8 else [*parts[:7], f"... {len(parts) - 7} more"]
    return ScheduleError(f"schedule {schedule.name}: deadlock: {'; '.join(shown)}")


def _misplaced(schedule: Schedule, rank: int, index: int) -> ScheduleError:
    """An operation that no order could make right here."""
    code = schedule.ops[rank][index]
    kind = code & KIND_MASK
    if code < 0 or kind > Kind.R:
        return _error(schedule, rank, index, "no such operation; the known kinds are F, B, I and W")
    op = unpack(code)
    stages, microbatches = schedule.placement.stages, schedule.microbatches
    if kind == Kind.R:
        what = "recomputation ahead of the backward is not supported"
    elif kind != Kind.F and schedule.forward_only:
        what = "a forward-only schedule has no backward"
    elif op.stage >= stages:
        what = f"out of range: stages go from 0 to {stages - 1}"
    elif op.microbatch >= microbatches:
        what = f"out of range: micro-batches go from 0 to {microbatches - 1}"
    elif code >> MICROBATCH_SHIFT != op.microbatch:
        what = "slices and flags are not supported"
    else:
        what = f"stage {op.stage} is on rank {schedule.placement.rank_of(op.stage)}"
    return _error(schedule, rank, index, what)


def _out_of_order(schedule: Schedule, rank: int, index: int, seen: int) -> ScheduleError:
    """An operation that is a duplicate, or comes before what it needs on its own rank."""
    op = unpack(schedule.ops[rank][index])
    if seen & _BIT[op.kind]:
        first = schedule.rank_ops(rank).index(op)
        return _error(schedule, rank, index, f"duplicate of op {first}")
    if seen & _BIT[Kind.B]:
        fused = op._replace(kind=Kind.B)
        first = schedule.rank_ops(rank).index(fused)
        return _error(schedule, rank, index, f"the fused {fused} (op {first}) did this already")
    if op.kind == Kind.B and seen & _BIT[Kind.I]:
        first = schedule.rank_ops(rank).index(op._replace(kind=Kind.I))
        return _error(schedule, rank, index, f"the split backward began at op {first} already")
    needed = op._replace(kind=Kind.I if op.kind == Kind.W and seen else Kind.F)
    later = schedule.rank_ops(rank)[index:]
    where = f"is op {index + later.index(needed)}" if needed in later else "is missing"
    return _error(schedule, rank, index, f"it needs {needed} first, which {where}")


def _error(schedule: Schedule, rank: int, index: int, what: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {schedule.name}: rank {rank}, op {index} "
        f"({_name(schedule, rank, index)}): {what}"
    )


def _name(schedule: Schedule, rank: int, index: int) -> str:
    code = schedule.ops[rank][index]
    return str(unpack(code)) if code >= 0 and code & KIND_MASK <= Kind.R else f"code {code}"
