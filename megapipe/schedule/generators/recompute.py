"""Recomputation ahead of the backward, so that an arriving gradient never waits for it.

A stage that recomputes saves only the input of its F; an R builds the activation from this input.
In these schedules a rank runs nothing between R and B, so it has one activation at a time, besides
saved inputs. The last stage, whose backward follows its forward at once, does not recompute.
"""

from array import array
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from megapipe.schedule.generators.one_f_one_b import one_f_one_b
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import (
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    Kind,
    Schedule,
    pack,
    packed,
)
from megapipe.schedule.placement import loop


def recompute_ahead(schedule: Schedule, stages: Collection[int]) -> Schedule:
    """Let `stages` recompute: insert an R directly before each of their I or B.

    For 1F1B the makespan is (p-1) R shorter than with recomputation within B: each stage except the
    last recomputes its first micro-batch while the gradient is in flight. The schedule must not
    have joined operations; the result has no activation_bound.
    """

    def with_recompute(codes: "array[int]") -> "array[int]":
        ops = array("q")
        for code in codes:
            if code & KIND_MASK in (Kind.I, Kind.B) and code >> STAGE_SHIFT & STAGE_MASK in stages:
                ops.append(code & ~KIND_MASK | Kind.R)
            ops.append(code)
        return ops

    return replace(
        schedule,
        ops=tuple(map(with_recompute, schedule.ops)),
        activation_bound=None,
        recompute=frozenset(stages),
    )


@register("merak")
def merak(ranks: int, microbatches: int) -> Schedule:
    """Run 1F1B that recomputes ahead: Merak's shifted critical path (Lai et al., 2206.04959).

    Two more points differ from 1F1B. The last stage does not recompute, so the makespan depends on
    the second to last rank. This rank has its third forward before its first backward, so that it
    need not wait for the first gradient. For p >= 2, m >= 3, F <= R and B <= F + R the makespan is
    (p-2)(F+B) + m(F+R+B), the shortest that recomputation on this rank allows. Peak: one
    micro-batch, and the saved inputs of min(p-r, m) micro-batches (min(3, m) on the second to last
    rank).
    """
    plain = one_f_one_b(ranks, microbatches)
    if ranks > 1 and microbatches > 2:
        critical = plain.ops[-2]  # F0 F1 B0 F2 ..
        critical[2], critical[3] = critical[3], critical[2]
    schedule = recompute_ahead(plain, range(ranks - 1))
    return replace(schedule, name="merak", activation_bound=(1,) * ranks)


@register("varuna")
def varuna(ranks: int, microbatches: int) -> Schedule:
    """Run Varuna's static schedule (Athlur et al., 2111.04007), by the rules of its simulator.

    In time slots of F = R = B/2 a rank runs the first of these that is possible: a backward, once
    its activation is recomputed; a recomputation, once the next rank has begun the backward; a
    forward. So a recomputation ends as its gradient arrives, and forwards run ahead wherever a rank
    would wait. Peak: one micro-batch, and the saved inputs of up to m micro-batches. Varuna
    deviates from its order at run time when a message is late ("opportunistic"). This schedule
    keeps the order; :mod:`megapipe.schedule.timing.opportunistic` computes what deviating gains.
    """
    return Schedule(
        name="varuna",
        placement=loop(ranks),
        microbatches=microbatches,
        ops=tuple(packed(ops) for ops in _by_priority(ranks, microbatches)),
        activation_bound=(1,) * ranks,
        recompute=frozenset(range(ranks - 1)),
    )


def _by_priority(ranks: int, microbatches: int) -> list[list[int]]:
    """Return each rank's list. In each time slot a rank runs a waiting backward if it has one, else
    a recomputation, else a forward; the oldest micro-batch comes first."""
    forward, recompute, backward = ([deque[int]() for _ in range(ranks)] for _ in range(3))
    forward[0].extend(range(microbatches))
    ops: list[list[int]] = [[] for _ in range(ranks)]
    in_backward = [False] * ranks  # the first of its two time slots is over
    left = ranks * microbatches
    while left:
        due: list[tuple[deque[int], int]] = []  # enters its queue in the next time slot
        for rank in range(ranks):
            if in_backward[rank]:
                in_backward[rank] = False
                continue
            if backward[rank]:
                kind, microbatch = Kind.B, backward[rank].popleft()
                in_backward[rank] = True
                left -= 1
                if rank > 0:
                    due.append((recompute[rank - 1], microbatch))
            elif recompute[rank]:
                kind, microbatch = Kind.R, recompute[rank].popleft()
                due.append((backward[rank], microbatch))
            elif forward[rank]:
                kind, microbatch = Kind.F, forward[rank].popleft()
                after = forward[rank + 1] if rank < ranks - 1 else backward[rank]
                due.append((after, microbatch))
            else:
                continue
            ops[rank].append(pack(kind, rank, microbatch))
        for queue, microbatch in due:
            queue.append(microbatch)
    return ops
