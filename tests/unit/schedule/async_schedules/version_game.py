"""An independent referee for versions: it walks through all lists at once and keeps a book.

It shares no code with the package beyond the names of its data. Weights are on a shelf for each
rank and stage; an update puts a version there, a reader asks for one, and a version is thrown away
when nobody asks for it any more.
"""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed
from tests.unit.schedule.schedule_referee import play


def stripped(schedule: Schedule) -> Schedule:
    """Return the schedule without its updates."""
    lists = [
        [op for op in schedule.rank_ops(rank) if op.kind != Kind.U]
        for rank in range(len(schedule.ops))
    ]
    ops = tuple(packed(pack(*op) for op in each) for each in lists)
    return replace(schedule, ops=ops, updates=None)


def play_versions(schedule: Schedule) -> str | None:
    """Return what is wrong with a schedule with updates; None if nothing is."""
    updates = schedule.updates
    assert updates is not None
    if schedule.microbatches % updates.window:
        return "a window that is not whole"
    fault = play(stripped(schedule))
    if fault:
        return fault
    windows = schedule.microbatches // updates.window
    table = schedule.placement.table
    for rank in range(len(schedule.ops)):
        fault = _one_list(schedule, rank, windows)
        if fault:
            return fault
    several = any(len({row[stage] for row in table}) > 1 for stage in range(len(table[0])))
    return _stuck(schedule) if updates.waits or several else None


def _one_list(schedule: Schedule, rank: int, windows: int) -> str | None:
    updates = schedule.updates
    steps = list(zip(schedule.rank_ops(rank), updates.reads[rank], strict=True))
    shelf = {stage: [0] for stage in schedule.placement.stages_of(rank)}
    summed: Counter[tuple[int, int]] = Counter()
    seen: dict[tuple[int, int], object] = {}
    latest_backward = 0
    for op, read in steps:
        if op.stage not in shelf:
            return "a stage of another rank"
        if op.kind == Kind.U:
            if op.microbatch != len(shelf[op.stage]) - 1 or op.microbatch >= windows:
                return "an update out of turn"
            ranks = {row[op.stage] for row in schedule.placement.table}
            if summed[op.stage, op.microbatch] != updates.window // len(ranks):
                return "an update before its gradients"
            if read.ahead or read.version != len(shelf[op.stage]):
                return "an update that says it makes another version"
            shelf[op.stage].append(read.version)
            continue
        if read.version not in shelf[op.stage]:
            return "a version that is not there"
        key = op.stage, op.microbatch
        if op.kind == Kind.F:
            seen[key] = read
        elif updates.follows and seen[key] != read:
            return "a backward with other weights"
        if op.kind in (Kind.B, Kind.W):
            summed[op.stage, op.microbatch // updates.window] += 1
        if op.kind in (Kind.B, Kind.I):
            if op.microbatch // updates.window < latest_backward:
                return "an unclean cut"
            latest_backward = op.microbatch // updates.window
    if any(len(versions) != windows + 1 for versions in shelf.values()):
        return "a missing update"
    if updates.kept is not None and most_kept(steps) > updates.kept[rank]:
        return "more weights than promised"
    return None


def most_kept(steps: list[tuple[Op, object]]) -> int:
    """Count the most weights of a stage that are there while an operation of the stage runs, by
    looking at all operations for each of them."""
    most = 0
    for place, (here, _) in enumerate(steps):
        own = [(n, op, read) for n, (op, read) in enumerate(steps) if op.stage == here.stage]
        made = [read for n, op, read in own if op.kind == Kind.U and n <= place]
        wanted = set()
        for read in {read for _, op, read in own if op.kind != Kind.U}:
            uses = [n for n, op, other in own if other == read and op.kind != Kind.U]
            begins = 0 if read.ahead == 0 else min(uses)
            if read.ahead == 0 and read.version > 0:
                begins = min(n for n, op, other in own if op.kind == Kind.U and other == read)
            if begins <= place <= max(uses):
                wanted.add((read.version, read.ahead))
        wanted.add((made[-1].version if made else 0, Fraction(0)))
        most = max(most, len(wanted))
    return most


def _stuck(schedule: Schedule) -> str | None:
    """Run all lists; an update needs every gradient of its window, of all stages or of its own."""
    window = schedule.updates.window
    lists = [schedule.rank_ops(rank) for rank in range(len(schedule.ops))]
    done: set[Op] = set()
    left = Counter(
        (op.microbatch // window, op.stage)
        for ops in lists
        for op in ops
        if op.kind in (Kind.B, Kind.I)
    )
    everywhere = range(schedule.placement.stages) if schedule.updates.waits else None
    at = [0] * len(lists)
    moved = True
    last = schedule.placement.stages - 1
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                stages = [op.stage] if everywhere is None else everywhere
                if op.kind == Kind.U and any(left[op.microbatch, each] for each in stages):
                    break
                if op.kind == Kind.F and op.stage and op._replace(stage=op.stage - 1) not in done:
                    break
                if op.kind in (Kind.B, Kind.I):
                    above = [
                        op._replace(kind=kind, stage=op.stage + 1) for kind in (Kind.B, Kind.I)
                    ]
                    if op.stage < last and not done.intersection(above):
                        break
                    left[op.microbatch // window, op.stage] -= 1
                done.add(op)
                at[rank] += 1
                moved = True
    return "stuck" if any(n < len(ops) for n, ops in zip(at, lists, strict=True)) else None
