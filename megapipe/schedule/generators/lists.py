"""Ways to make operation lists that several generators use."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

from megapipe.schedule.ir import JOINED, KIND_MASK, Kind, Schedule, packed, span


def weave(*columns: Sequence[int]) -> "array[int]":
    """The first operation of each column, then the second of each, and so on.

    Columns are of equal length. Takes about 0.02 microseconds per operation.
    """
    ops = packed([0]) * sum(map(len, columns))
    for place, column in enumerate(columns):
        ops[place :: len(columns)] = packed(column)
    return ops


def in_groups(kind: Kind, stages: Sequence[int], microbatches: int, group: int) -> "array[int]":
    """For each group of micro-batches (the last may be shorter), for each stage in the order
    given: the operations of the group."""
    ops = array("q")
    for first in range(0, microbatches, group):
        for stage in stages:
            ops.extend(span(kind, stage, first, min(first + group, microbatches)))
    return ops


def split_backwards(schedule: Schedule) -> Schedule:
    """Every B as an I with its W directly after it: the same order, and input gradients leave
    sooner. A B that is joined with another operation stays."""
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
