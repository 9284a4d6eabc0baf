"""Pipelines over slices of sequences: TeraPipe (2102.07988) and Seq1F1B (2406.03488).

A *piece* is one slice of one micro-batch. Causal attention lets stage s+1 begin with a slice while
stage s computes the next one, so m micro-batches of k slices fill a pipeline as m*k small
micro-batches do, except that the backwards of a micro-batch pop its slices last first. Hence both
1F1B generators take a schedule of m*k micro-batches and change two things: piece u becomes slice
u mod k of micro-batch u div k (backward: slice k-1 - u mod k), and every backward comes k-1
forwards later.

Why that never deadlocks. The changed schedule gives the F, or the B, of piece u the place of the F
or B of micro-batch u, on all ranks and stages alike, and groups hold whole micro-batches. So what
proves the original free of deadlock carries over: the order of forwards among themselves and of
backwards among themselves is the same, and that between the two is moved by k-1 pieces on every
rank. What is left is that a backward comes after the forward of its own piece: the backward at
place i needs the forward of a piece at most k-1 places later than the original needed, and that is
what the shift provides.
"""

from array import array
from dataclasses import replace

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.gpipe import gpipe_on
from megapipe.schedule.generators.interleaved import interleaved_1f1b
from megapipe.schedule.generators.one_f_one_b import one_f_one_b
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import KIND_MASK, MICROBATCH_SHIFT, SLICE_SHIFT, Kind, Schedule
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop

_LOW = (1 << MICROBATCH_SHIFT) - 1


@register("terapipe")
def terapipe(ranks: int, microbatches: int, slices: int = 2) -> Schedule:
    """All forwards, then all backwards, over slices (Li et al., 2102.07988).

    Bubble for k slices of equal time: (p-1)/(m k + p-1) of the makespan. Peak: all m micro-batches.
    Of unequal slices on equal stages the makespan is m times their sum and p-1 times the longest,
    for which :func:`megapipe.layout.slices.fastest_slices` finds the paper's lengths.
    """
    return replace(gpipe_on(loop(ranks), microbatches, slices=slices), name="terapipe")


@register("seq1f1b")
def seq1f1b(ranks: int, microbatches: int, slices: int = 2) -> Schedule:
    """1F1B over slices (Sun et al., 2406.03488).

    Rank r warms up with min(p-2-r+k, m k) slices. Idle time for k slices of equal time:
    (p-1)(F+B)/k, a k-th of 1F1B's. Peak on rank r: min(p-1-r+k, m k)/k micro-batches. Equal times
    are those of :func:`megapipe.layout.slices.balanced_slices`. One slice is 1F1B.
    """
    return in_slices("seq1f1b", one_f_one_b(ranks, microbatches * slices), slices)


@register("interleaved_seq1f1b")
def interleaved_seq1f1b(
    ranks: int, microbatches: int, chunks: int = 2, slices: int = 2, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B over slices (2406.03488).

    Rank r warms up with the paper's min(2(p-1-r) + (v-1) p + k-1, m v k) slices where k divides p
    and p/k divides m, and holds one more at its peak; v k of them are a micro-batch. The idle time
    is (p-1)(F+B)/(v k) for slices of equal time, F and B being those of a full rank. Elsewhere a
    group has more slices than ranks, or is cut short, and that warm-up need not suffice; there it
    is that of ``interleaved_1f1b`` plus k-1. One chunk is Seq1F1B.

    Args:
        group: micro-batches per group, 1 to microbatches; default: the fewest with a slice for
            every rank, ceil(p/k), or all of them if they are fewer.

    Raises:
        ScheduleError: group out of range.
    """
    group = min(-(-ranks // slices), microbatches) if group is None else group
    if not 1 <= group <= microbatches:
        raise ScheduleError(
            f"schedule interleaved_seq1f1b: group must be from 1 to microbatches = {microbatches}, "
            f"not {group}"
        )
    pieces = interleaved_1f1b(ranks, microbatches * slices, chunks, group * slices)
    return in_slices("interleaved_seq1f1b", pieces, slices)


def in_slices(name: str, pieces: Schedule, slices: int) -> Schedule:
    """A schedule of m*k micro-batches as one of m micro-batches in k slices each."""
    ops = tuple(rank_ops(codes, slices) for codes in pieces.ops)
    return Schedule(
        name=name,
        placement=pieces.placement,
        microbatches=pieces.microbatches // slices,
        ops=ops,
        activation_bound=tuple(map(most_held, ops)),
        slices=slices,
    )


def rank_ops(pieces: "array[int]", slices: int) -> "array[int]":
    """The list of one rank, from its list over pieces: backwards come slices-1 forwards later."""
    ahead = slices - 1
    forwards = [_slice_of(code, slices) for code in pieces if code & KIND_MASK == Kind.F]
    ops = array("q", forwards[:ahead])
    started = ahead
    for code in pieces:
        if code & KIND_MASK != Kind.F:
            ops.append(_slice_of(code, slices))
        elif started < len(forwards):
            ops.append(forwards[started])
            started += 1
    return ops


def _slice_of(code: int, slices: int) -> int:
    """The operation on a slice that an operation on a piece stands for."""
    microbatch, part = divmod(code >> MICROBATCH_SHIFT, slices)
    if code & KIND_MASK != Kind.F:
        part = slices - 1 - part
    return code & _LOW | microbatch << MICROBATCH_SHIFT | part << SLICE_SHIFT
