"""When all holders of a stage are through with it, so that its gradients can be reduced.

A stage of a bidirectional pipeline, or one with replicas, has several holders, which reduce its
gradients together as soon as the last of them has run its last weight gradient (the eager
synchronisation of Chimera, 2107.06925). All holders must agree when that is, and which of two
stages comes first. So the
schedule is timed with a fixed length for each kind of operation (:data:`LENGTH`), and each rank
puts the reduction after its operations that have ended by then. Sorted by their ends, the
operations and reductions of all ranks form one order. Each program is a part of that order, and
nothing in it comes before what it needs, so ranks can never wait for each other in a circle.
"""

from bisect import bisect_right
from typing import NamedTuple

from megapipe.schedule.dependencies import LOW, PIECE_SHIFT, PIECES, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, STAGE_MASK, STAGE_SHIFT, Kind, Schedule

LENGTH = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.R: 1, Kind.U: 1}
"""Time of an operation by kind, the same on all ranks."""


class SharedReduction(NamedTuple):
    """Where a rank takes part in the reduction of a stage that others hold too."""

    done: int
    """Operations of the rank before the reduction."""
    stage: int


def shared_reductions(schedule: Schedule) -> list[list[SharedReduction]]:
    """Per rank, its reductions with other holders, in order. A holder that adds no gradient to a
    stage is through with it when its list ends."""
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
    """By rank, when its operations end if messages take no time."""
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
            pieces = [code >> PIECE_SHIFT & PIECES for code in together]
            needed = [need[code & LOW] + u for code, u in zip(together, pieces, strict=True)]
            missing = [
                slot for slot in needed if slot < dependencies.always and slot not in finished
            ]
            if missing:
                waiting[missing[0]] = rank
                break
            end = max([finished.get(slot, 0) for slot in needed] + mine[-1:])
            end += sum(LENGTH[Kind(code & KIND_MASK)] for code in together)
            for code, piece in zip(together, pieces, strict=True):
                mine.append(end)
                slot = make[code & LOW] + piece
                finished[slot] = end
                if slot in waiting:
                    ready.append(waiting.pop(slot))
    return ends
