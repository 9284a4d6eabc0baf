"""Micro-batches in groups: what all interleaved orders run through."""

from array import array
from collections.abc import Sequence

from megapipe.schedule.ir import Kind, span


def in_groups(kind: Kind, stages: Sequence[int], microbatches: int, group: int) -> "array[int]":
    """For each group of micro-batches (the last may be shorter), for each stage in the order
    given: the operations of the group."""
    ops = array("q")
    for first in range(0, microbatches, group):
        for stage in stages:
            ops.extend(span(kind, stage, first, min(first + group, microbatches)))
    return ops
