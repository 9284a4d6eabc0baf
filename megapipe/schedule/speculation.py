"""The prefix of a step that can be undone: forwards that all ranks can run before any backward.

Each rank stops before its first operation that is not a forward, or whose input a stopped rank has
not made. So every message of the prefix can be received within it, and a step that is aborted after
the prefix leaves nothing behind. At that point an optimizer step that was taken before the global
norm was known is validated (:mod:`megapipe.train.step.post_validation`).
"""

import itertools
from collections import Counter
from collections.abc import Sequence

from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.program import ActionKind, Program


def speculation(schedule: Schedule) -> tuple[int, ...]:
    """Number of operations of each rank's prefix, by pipeline rank."""
    lists = [iter(schedule.rank_ops(rank)) for rank in range(schedule.placement.ranks)]
    heads: list[Op | None] = [next(ops, None) for ops in lists]
    counts = [0] * len(lists)
    done: set[tuple[int, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(lists):
            while (op := heads[rank]) is not None and _may_run(op, done):
                done.add((op.stage, op.microbatch, op.slice))
                heads[rank] = next(ops, None)
                counts[rank] += 1
                moved = True
    return tuple(counts)


def _may_run(op: Op, done: set[tuple[int, int, int]]) -> bool:
    """Whether an operation is a forward that is not joined and whose input has been made. The slice
    before it, whose keys and values it needs, is earlier in the list of the same rank."""
    if op.kind != Kind.F or op.joined:
        return False
    return op.stage == 0 or (op.stage - 1, op.microbatch, op.slice) in done


def cut(program: Program, operations: int) -> int:
    """Number of actions of a rank's first `operations` operations, messages sent included."""
    index = 0
    for _ in range(operations):
        while program.actions[index].do != ActionKind.COMPUTE:
            index += 1
        index += 1
        while index < len(program.actions) and program.actions[index].do == ActionKind.SEND:
            index += 1
    return index


def arriving(schedule: Schedule, rank: int, operations: Sequence[int]) -> Counter[int]:
    """Messages that other ranks send to `rank` within their prefixes, by sender."""
    counts: Counter[int] = Counter()
    for sender, number in enumerate(operations):
        for op in itertools.islice(schedule.rank_ops(sender), number):
            homes = schedule.placement.table[schedule.direction_of(op.microbatch)]
            if sender != rank and homes[op.stage + 1 : op.stage + 2] == (rank,):
                counts[sender] += 1
    return counts
