"""Errors of invalid schedules, with rank, index in its list, operation and reason."""

from megapipe.errors import ScheduleError
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.ir import KIND_MASK, Kind, Op, Schedule, unpack

BIT = {Kind.F: 1, Kind.I: 2, Kind.W: 4, Kind.B: 8, Kind.R: 16}
"""Bit of each kind; a sum of bits is the set of kinds found for a (stage, micro-batch, slice)."""


def deadlock(
    dependencies: Dependencies, cursor: list[int], waiting: dict[int, list[int]]
) -> ScheduleError:
    """Make the error that lists ranks which wait for each other in a circle.

    `cursor`: per rank, the index of the operation that cannot run. `waiting`: the ranks that wait
    for each result, by result number. The search starts at the first waiting rank.
    """
    schedule = dependencies.schedule
    wanted = {rank: dependencies.maker(made) for made, ranks in waiting.items() for rank in ranks}
    rank = min(wanted)
    chain: list[int] = []
    while rank not in chain:
        chain.append(rank)
        rank = wanted[rank][0]
    circle = chain[chain.index(rank) :]
    parts = []
    for rank in circle:
        owner, makers = wanted[rank]
        index, needed = next(
            (index, op)
            for index, op in enumerate(schedule.rank_ops(owner))
            if op._replace(joined=False) in makers
        )
        parts.append(
            f"rank {rank} op {cursor[rank]} ({_name(schedule, rank, cursor[rank])}) waits for "
            f"{needed}, op {index} of rank {owner}"
        )
    shown = parts if len(parts) <= 8 else [*parts[:7], f"... {len(parts) - 7} more"]
    return ScheduleError(f"schedule {schedule.name}: deadlock: {'; '.join(shown)}")


def misplaced(schedule: Schedule, rank: int, index: int) -> ScheduleError:
    """Make the error of an operation that is wrong wherever it is in this rank's list."""
    code = schedule.ops[rank][index]
    kind = code & KIND_MASK
    if code < 0 or kind > Kind.U or code >> 61:
        return error(
            schedule, rank, index, "no such operation; the known kinds are F, B, I, W, R and U"
        )
    op = unpack(code)
    stages, microbatches = schedule.placement.stages, schedule.microbatches
    if kind != Kind.F and schedule.forward_only:
        what = "a forward-only schedule has no backward"
    elif kind == Kind.U and schedule.updates is None:
        what = "updates (U) are only in a schedule that has `updates`"
    elif op.stage >= stages:
        what = f"out of range: stages go from 0 to {stages - 1}"
    elif op.microbatch >= microbatches:
        what = f"out of range: micro-batches go from 0 to {microbatches - 1}"
    elif op.slice >= schedule.slices:
        what = f"out of range: slices go from 0 to {schedule.slices - 1}"
    elif kind == Kind.R and op.stage not in schedule.recompute:
        what = f"stage {op.stage} does not recompute; name it in the schedule's recompute"
    else:
        direction = schedule.direction_of(op.microbatch)
        of = f" of micro-batch {op.microbatch}" if len(schedule.placement.table) > 1 else ""
        holder = schedule.placement.rank_of(op.stage, direction)
        what = f"stage {op.stage}{of} is on rank {holder}"
    return error(schedule, rank, index, what)


def badly_joined(schedule: Schedule, rank: int, index: int) -> ScheduleError:
    """Make the error of an operation that cannot be joined with the next one of its list."""
    ops = schedule.ops[rank]
    if index + 1 == len(ops):
        what = "it is joined with the next operation, but it is the last of its list"
        return error(schedule, rank, index, what)
    after = unpack(ops[index + 1])
    why = "is joined with a third operation" if after.joined else "is of the same micro-batch"
    return error(schedule, rank, index, f"it is joined with {after}, which {why}")


def out_of_order(schedule: Schedule, rank: int, index: int, seen: int) -> ScheduleError:
    """Make the error of a duplicate, or of an operation that comes before one that it needs on its
    rank. `seen`: kinds (sum of BIT) that came before for the same stage, micro-batch and slice."""
    op = unpack(schedule.ops[rank][index])._replace(joined=False)
    plain = [other._replace(joined=False) for other in schedule.rank_ops(rank)]
    if seen & BIT[op.kind]:
        return error(schedule, rank, index, f"duplicate of op {plain.index(op)}")
    if seen & BIT[Kind.B]:
        fused = op._replace(kind=Kind.B)
        first = plain.index(fused)
        return error(schedule, rank, index, f"the fused {fused} (op {first}) did this already")
    if op.kind in (Kind.B, Kind.R) and seen & BIT[Kind.I]:
        first = plain.index(op._replace(kind=Kind.I))
        return error(schedule, rank, index, f"the split backward began at op {first} already")
    needed = op._replace(kind=Kind.I if op.kind == Kind.W and seen else Kind.F)
    return error(schedule, rank, index, _first(needed, plain, index))


def slice_out_of_order(dependencies: Dependencies, rank: int, index: int) -> ScheduleError:
    schedule = dependencies.schedule
    op = unpack(schedule.ops[rank][index])._replace(joined=False)
    plain = [other._replace(joined=False) for other in schedule.rank_ops(rank)]
    if op.kind == Kind.F:
        needed = op._replace(slice=op.slice - 1)
    else:
        later = op._replace(slice=op.slice + 1)
        kinds = (op.kind, Kind.I if op.kind == Kind.B else Kind.B)
        options = [later._replace(kind=kind) for kind in kinds]
        needed = next((option for option in options if option in plain), options[0])
    return error(schedule, rank, index, _first(needed, plain, index))


def _first(needed: Op, ops: list[Op], index: int) -> str:
    later = ops[index:]
    position = f"is op {index + later.index(needed)}" if needed in later else "is missing"
    return f"it needs {needed} first, which {position}"


def over(schedule: Schedule, rank: int, index: int, held: int, limit: int) -> ScheduleError:
    what = (
        f"from this operation on, the rank holds {held} activations, more than the {limit} "
        "promised in `activation_bound`"
    )
    return error(schedule, rank, index, what)


def error(schedule: Schedule, rank: int, index: int, what: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {schedule.name}: rank {rank}, op {index} "
        f"({_name(schedule, rank, index)}): {what}"
    )


def _name(schedule: Schedule, rank: int, index: int) -> str:
    code = schedule.ops[rank][index]
    known = code >= 0 and code & KIND_MASK <= Kind.U and not code >> 61
    return str(unpack(code)) if known else f"code {code}"
