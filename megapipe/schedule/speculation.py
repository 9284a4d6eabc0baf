"""The prefix of a step that can be undone: forwards that all ranks can run before any backward.

A rank's prefix ends before its first operation that is not a forward, or whose input is not made
within the sender's prefix. So every message of the prefix can be received within it, and a step
that is aborted after the prefix leaves nothing behind. Post-validation uses this: a rank updates
its weights before the global gradient norm is known, runs the next step's prefix, and aborts it if
the norm requires another update (:mod:`megapipe.train.step.post_validation`).
"""

import itertools
from collections import Counter
from collections.abc import Sequence

from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.program import ActionKind, Program


def speculation(schedule: Schedule) -> tuple[int, ...]:
    """Return the number of operations in each pipeline rank's prefix."""
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
    """Whether an operation is a forward that is not joined and whose input has been made. Keys and
    values of the previous slice need no check: it is earlier in the same rank's list."""
    if op.kind != Kind.F or op.joined:
        return False
    return op.stage == 0 or (op.stage - 1, op.microbatch, op.slice) in done


def cut(program: Program, operations: int) -> int:
    """Return how many actions at the start of a program belong to its first `operations`
    operations, including their sends and receives."""
    index = 0
    for _ in range(operations):
        while program.actions[index].do != ActionKind.COMPUTE:
            index += 1
        index += 1
        while index < len(program.actions) and program.actions[index].do == ActionKind.SEND:
            index += 1
    return index


def arriving(schedule: Schedule, rank: int, operations: Sequence[int]) -> Counter[int]:
    """Count the messages that other ranks send to `rank` within their prefixes, by sender."""
    counts: Counter[int] = Counter()
    for sender, number in enumerate(operations):
        for op in itertools.islice(schedule.rank_ops(sender), number):
            rank_of = schedule.placement.table[schedule.direction_of(op.microbatch)]
            if sender != rank and rank_of[op.stage + 1 : op.stage + 2] == (rank,):
                counts[sender] += 1
    return counts
