"""Functions that build or change lists of operations, for several generators."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from megapipe.schedule.ir import JOINED, KIND_MASK, Kind, Schedule, packed, span


def weave(*columns: Sequence[int]) -> "array[int]":
    """Interleave columns of operations: the first operation of each column, then the second of each
    column, and so on.

    All columns have the same length. This takes about 0.02 microseconds per operation.
    """
    ops = packed([0]) * sum(map(len, columns))
    for offset, column in enumerate(columns):
        ops[offset :: len(columns)] = packed(column)
    return ops


def in_groups(kind: Kind, stages: Sequence[int], microbatches: int, group: int) -> "array[int]":
    """Return operations of one kind, in groups of `group` micro-batches (the last group may be
    shorter). Within a group they are sorted by stage, in the order of `stages`."""
    ops = array("q")
    for first in range(0, microbatches, group):
        for stage in stages:
            ops.extend(span(kind, stage, first, min(first + group, microbatches)))
    return ops


def split_backwards(schedule: Schedule) -> Schedule:
    """Replace every B by an I and, directly after it, a W, so that input gradients are sent sooner.
    A B that is joined with another operation is not split."""
    lists = []
    for ops in schedule.ops:
        codes: list[int] = []
        joined = False
        for code in ops:
            alone = not joined
            joined = code >= JOINED
            if code & KIND_MASK == Kind.B and alone and not joined:
                base = code - Kind.B
                codes += [base + Kind.I, base + Kind.W]
            else:
                codes.append(code)
        lists.append(packed(codes))
    return replace(schedule, ops=tuple(lists))
