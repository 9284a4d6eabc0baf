"""DualPipe (DeepSeek-V3, 2412.19437): both directions, forward and backward at the same time.

A rank has two phases: it is in the first half of one pipeline, its phase 0; the opposite pipeline
is its phase 1. Each phase has n micro-batches. The first half has H ranks: h before the rank, and l
= H-h-1 after it. F0 is a forward of phase 0. F&B is a joined pair: F and B of two micro-batches,
run overlapped. W is the oldest deferred weight gradient. The rank's list is:

  1. 2l times F0;
  2. h+1 times F0 F1;
  3. l times I1 W F1;
  4. n-2H+h+1 times F0&B1 F1&B0; on ranks with l = 0 the first F0 and B1 are not joined;
  5. l times B1 F1&B0;
  6. h+1 times B1 B0; the last h+1 operations are I instead of B;
  7. l times W I0;
  8. h+1 times W.

The cut-in-half form (``dualpipe_v``) folds the two directions into a V: phase 0 goes down the
ranks, phase 1 back up, and every micro-batch passes through both.
"""

from array import array
from collections import deque

from megapipe.schedule.generators.grid import bidirectional
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import JOINED, Kind, Schedule, pack
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop, vee


@register("dualpipe")
def dualpipe(ranks: int, microbatches: int) -> Schedule:
    """Let micro-batches enter in turn from both ends; p must be even.

    F&B is the time of a joined pair; H = p/2 and h = min(r, p-1-r). With chunk times F = I = W and
    B = I + W, and m even and at least 2p, the idle time of rank r is (H-1)(F&B + B - 3W) - max(0,
    H-2-h)(F+B - F&B). The first term is the published bubble; the second exists because outer ranks
    have fewer joined pairs. If the times differ, the published value is near, not exact. Peak: p+1
    micro-batches; weights: two replicas. The paper has m even and at least 2p. Here any m works:
    the schedule is made for the next such m, and the excess micro-batches are omitted.

    Raises:
        ScheduleError: an odd number of ranks.
    """
    placement = bidirectional("dualpipe", loop(ranks))
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
    """Run DualPipe cut in half: on the V placement of p ranks, without replicas of the weights.

    F&B is the time of a joined pair. With chunk times F = I = W and B = I + W, and m >= 2p, the
    idle time of rank r is (p-1)(F&B + B - 3W) - max(0, p-2-r)(F+B - F&B). Peak: 2p+1 chunk
    activations, which are p+1/2 micro-batches. Any m and any p. Published tables list two replicas
    of the weights, as they compare it with pipelines of twice as many ranks.
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
    """Return the operations of one rank, in the order of the module's docstring.

    The pipeline of phase 0 has `half` ranks in its first half, `before` of them before this rank.
    `stages` has the rank's stage in each phase, and `numbers` the micro-batches of each phase.
    Micro-batches from `microbatches` on are omitted.
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
        exists = microbatch < microbatches
        if exists:
            if joining:
                ops[-1] |= JOINED
            ops.append(pack(kind, stage, microbatch))
        joining = exists and word.endswith("&")
    return ops


def _words(before: int, half: int, turns: int) -> list[str]:
    """Return one rank's list (see the module) as words of kind and phase, such as "F0". A "&" after
    a word joins it with the next word. Each phase has `turns` micro-batches."""
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
