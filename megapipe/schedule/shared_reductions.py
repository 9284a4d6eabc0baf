"""When stages with several holders are reduced: once all holders have computed their gradients.

A stage of a bidirectional pipeline, or a replicated stage, has several holders, which reduce its
gradients together as soon as the last of them has run its last weight gradient (the eager
synchronisation of Chimera, 2107.06925). All holders must agree when this is, and in which order
stages are reduced. So the schedule is timed with a nominal length for each kind of operation
(:data:`LENGTH`), and each rank puts a reduction after the operations that have ended by its nominal
time. Sorted by nominal time, the operations and reductions of all ranks form one order, in which
everything comes after its inputs. Programs are subsequences of this order, so ranks cannot
deadlock.
"""

from bisect import bisect_right
from typing import NamedTuple

from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_MASK, STAGE_SHIFT, Kind, Schedule

LENGTH = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.R: 1, Kind.U: 1}
"""Nominal time of an operation by kind, the same on all ranks."""


class SharedReduction(NamedTuple):
    """Reduction of a stage that other ranks hold too, and its place in a rank's list."""

    done: int
    """Number of the rank's operations before the reduction."""
    stage: int


def shared_reductions(schedule: Schedule) -> list[list[SharedReduction]]:
    """Return, per rank, the reductions of stages that other ranks hold too, in order. A holder that
    adds no gradient to a stage has finished the stage when its list ends."""
    placement = schedule.placement
    shared = [s for s in range(placement.stages) if len(placement.holders(s)) > 1]
    found: list[list[SharedReduction]] = [[] for _ in schedule.ops]
    if schedule.forward_only or not shared:
        return found
    ends = _ends(schedule)
    through: list[dict[int, int]] = []
    for ops, times in zip(schedule.ops, ends, strict=True):
        added = {
            code >> STAGE_SHIFT & STAGE_MASK: end
            for code, end in zip(ops, times, strict=True)
            if code & KIND_MASK in (Kind.B, Kind.W)
        }
        last = times[-1] if times else 0
        through.append({stage: added.get(stage, last) for stage in shared})
    complete = {s: max(through[rank][s] for rank in placement.holders(s)) for s in shared}
    for stage in sorted(shared, key=lambda s: (complete[s], s)):
        for rank in placement.holders(stage):
            found[rank].append(SharedReduction(bisect_right(ends[rank], complete[stage]), stage))
    return found


def _ends(schedule: Schedule) -> list[list[int]]:
    """Return the nominal end time of each operation, per rank; messages take no time."""
    dependencies = Dependencies(schedule)
    need, make = dependencies.base
    lists = [dependencies.codes(rank) for rank in range(len(schedule.ops))]
    ends: list[list[int]] = [[] for _ in lists]
    finished: dict[int, int] = {}
    waiting: dict[int, int] = {}
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        codes, mine = lists[rank], ends[rank]
        while len(mine) < len(codes):
            first = len(mine)
            together = codes[first : first + (2 if codes[first] >= JOINED else 1)]
            items = [code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK for code in together]
            needed = [need[code & LOW] + u for code, u in zip(together, items, strict=True)]
            missing = [
                each for each in needed if each < dependencies.always and each not in finished
            ]
            if missing:
                waiting[missing[0]] = rank
                break
            end = max([finished.get(each, 0) for each in needed] + mine[-1:])
            end += sum(LENGTH[Kind(code & KIND_MASK)] for code in together)
            for code, item in zip(together, items, strict=True):
                mine.append(end)
                result = make[code & LOW] + item
                finished[result] = end
                if result in waiting:
                    ready.append(waiting.pop(result))
    return ends
