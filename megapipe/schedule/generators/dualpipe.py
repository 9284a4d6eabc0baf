"""DualPipe (DeepSeek-V3, 2412.19437): both directions, forward and backward at the same time.

A rank has two phases: 0 is the pipeline that it is in the first half of, 1 the other one. Each
phase has n micro-batches. With H ranks to the middle, of which h come before this one, and
l = H-h-1 after it, a rank's list is, by phase:

1. 2l times F0;
2. h+1 times F0 F1;
3. l times I1 W F1;
4. n-2H+h+1 times F0&B1 F1&B0; the first F0 and B1 of the middle ranks are not joined;
5. l times B1 F1&B0;
6. h+1 times B1 B0, of which the last h+1 operations are an I in place of the B;
7. l times W I0;
8. h+1 times W.

F&B is one operation on two micro-batches, and W takes the oldest weight gradient that waits. The
cut-in-half form folds the two directions into a V: phase 0 is the way down, phase 1 the way up, and
every micro-batch has both phases.
"""

from array import array
from collections import deque

from megapipe.schedule.generators.grid import both_ways
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import JOINED, Kind, Schedule, pack
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop, vee


@register("dualpipe")
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Micro-batches enter in turn from both ends; p must be even.

    With chunk times F = I = W, B = I + W and F&B for a joined pair, m even and at least 2p, the
    idle time of rank r is (H-1)(F&B + B - 3W) - max(0, H-2-h)(F+B - F&B). The first term is the
    published bubble; the second is there as outer ranks join fewer pairs. Where the times differ
    the published value is near, not exact. Peak: p+1 micro-batches; weights: two copies. The paper
    has m even and at least 2p. Here any m works: the list is that of the next such m without the
    micro-batches that are not there.

    Raises:
        ScheduleError: an odd number of ranks.
    """
    placement = both_ways("dualpipe", loop(ranks))
    turns = max(ranks, -(-microbatches // 2))
    ops = []
    for rank in range(ranks):
        mirror = ranks - 1 - rank
        own = 0 if rank < mirror else 1
        ops.append(
            rank_ops(
                before=min(rank, mirror),
                half=ranks // 2,
                stages=(min(rank, mirror), max(rank, mirror)),
                numbers=(range(own, 2 * turns, 2), range(1 - own, 2 * turns, 2)),
                microbatches=microbatches,
            )
        )
    return Schedule(
        name="dualpipe",
        placement=placement,
        microbatches=microbatches,
        ops=tuple(ops),
        activation_bound=tuple(map(most_held, ops)),
        direction=tuple(microbatch % 2 for microbatch in range(microbatches)),
    )


@register("dualpipe_v", "cut_in_half")
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: the same lists on a V of p ranks, without copies of the weights.

    Idle time for m >= 2p: as there, with H = p and h = r. Peak: 2p+1 chunk activations, which are
    p+1/2 micro-batches. Any m, as there, and any p. Published tables give it two copies of the
    weights, as they compare with twice as many ranks.
    """
    turns = range(max(2 * ranks, microbatches))
    ops = tuple(
        rank_ops(
            before=rank,
            half=ranks,
            stages=(rank, 2 * ranks - 1 - rank),
            numbers=(turns, turns),
            microbatches=microbatches,
        )
        for rank in range(ranks)
    )
    return Schedule(
        name="dualpipe_v",
        placement=vee(ranks),
        microbatches=microbatches,
        ops=ops,
        activation_bound=tuple(map(most_held, ops)),
    )


def rank_ops(
    *,
    before: int,
    half: int,
    stages: tuple[int, int],
    numbers: tuple[range, range],
    microbatches: int,
) -> "array[int]":
    """The list of one rank; stages and micro-batch numbers by phase.

    Operations of micro-batches from `microbatches` on are left out.
    """
    forwards = [iter(of_phase) for of_phase in numbers]
    backwards = [iter(of_phase) for of_phase in numbers]
    queue: deque[tuple[int, int]] = deque()
    ops = array("q")
    joining = False
    for word in _words(before, half, len(numbers[0])):
        kind = Kind[word[0]]
        if kind == Kind.W:
            stage, microbatch = queue.popleft()
        else:
            phase = int(word[1])
            stage = stages[phase]
            microbatch = next((forwards if kind == Kind.F else backwards)[phase])
        if kind == Kind.I:
            queue.append((stage, microbatch))
        there = microbatch < microbatches
        if there:
            if joining:
                ops[-1] |= JOINED
            ops.append(pack(kind, stage, microbatch))
        joining = there and word.endswith("&")
    return ops


def _words(before: int, half: int, turns: int) -> list[str]:
    """The list of the module's docstring, "&" where an operation is joined with the next."""
    after = half - before - 1
    middle = ["F0&", "B1", "F1&", "B0"] * (turns - 2 * half + before + 1)
    if after == 0:
        middle[0] = "F0"
    fused = ["B1", "B0"] * (before + 1)
    split = [word.replace("B", "I") for word in fused[before + 1 :]]
    return [
        *["F0"] * 2 * after,
        *["F0", "F1"] * (before + 1),
        *["I1", "W", "F1"] * after,
        *middle,
        *["B1", "F1&", "B0"] * after,
        *fused[: before + 1],
        *split,
        *["W", "I0"] * after,
        *["W"] * (before + 1),
    ]
