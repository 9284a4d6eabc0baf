"""Pipelines over slices of sequences: TeraPipe (2102.07988) and Seq1F1B (2406.03488).

A *work item* is one slice of one micro-batch. Causal attention lets stage s+1 begin with a slice
while stage s computes the next one. So m micro-batches of k slices fill a pipeline like m*k small
micro-batches, except that backwards begin with a micro-batch's last slice. Hence both 1F1B
generators take a schedule of m*k micro-batches and change two things: micro-batch u becomes the
work item of slice u mod k of micro-batch u div k (backward: slice k-1 - u mod k), and every
backward comes k-1 forwards later.

Why this never deadlocks. In the changed schedule the F (or B) of work item u stands where the F (or
B) of micro-batch u stood, on all ranks and stages alike, and groups hold whole micro-batches. So
the proof for the original schedule carries over: the order of forwards among themselves is the
same, and the order of backwards too; backwards are shifted behind k-1 more forwards on every rank.
It remains to show that a backward comes after the forward of its own work item: the backward at
index i needs the forward of a work item at most k-1 indices later than in the original, and the
shift provides it.
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
    """Run all forwards, then all backwards, over slices (Li et al., 2102.07988).

    Bubble for k slices of equal time: (p-1)/(m k + p-1) of the makespan. Peak: all m micro-batches.
    With unequal slices on equal stages the makespan is m times the sum of all slices' times plus
    p-1 times the longest slice's time; :func:`megapipe.layout.slice_search.fastest_slices`
    minimizes it as the paper does.
    """
    return replace(gpipe_on(loop(ranks), microbatches, slices=slices), name="terapipe")


@register("seq1f1b")
def seq1f1b(ranks: int, microbatches: int, slices: int = 2) -> Schedule:
    """Run 1F1B over slices (Sun et al., 2406.03488).

    Rank r warms up with min(p-2-r+k, m k) slices. Idle time for k slices of equal time:
    (p-1)(F+B)/k, a k-th of 1F1B's. Peak on rank r: min(p-1-r+k, m k)/k micro-batches.
    :func:`megapipe.layout.slice_search.balanced_slices` finds slices of equal time. With one slice
    it is 1F1B.
    """
    return in_slices("seq1f1b", one_f_one_b(ranks, microbatches * slices), slices)


@register("interleaved_seq1f1b")
def interleaved_seq1f1b(
    ranks: int,
    microbatches: int,
    chunks: int = 2,
    slices: int = 2,
    microbatch_group_size: int | None = None,
) -> Schedule:
    """Run interleaved 1F1B over slices (2406.03488).

    If k divides p and p/k divides m, rank r warms up with the paper's min(2(p-1-r) + (v-1) p + k-1,
    m v k) slices of one chunk. Its peak is one more; a micro-batch has v k such slices. The idle
    time is (p-1)(F+B)/(v k) for slices of equal time, where F and B are the times of 1/p of the
    model. For other sizes a group has more slices than ranks, or the last group is shorter, and the
    paper's warm-up can be too short. The warm-up is then ``interleaved_1f1b``'s, for m k
    micro-batches, plus k-1 slices. With one chunk it is Seq1F1B.

    Args:
        microbatch_group_size: micro-batches per group, 1 to microbatches. Default: the fewest that
            have a slice for every rank, min(ceil(p/k), microbatches).

    Raises:
        ScheduleError: microbatch_group_size out of range.
    """
    fewest = min(-(-ranks // slices), microbatches)
    group = fewest if microbatch_group_size is None else microbatch_group_size
    if not 1 <= group <= microbatches:
        raise ScheduleError(
            "schedule interleaved_seq1f1b: microbatch_group_size must be from 1 to microbatches = "
            f"{microbatches}, not {group}"
        )
    unsliced = interleaved_1f1b(ranks, microbatches * slices, chunks, group * slices)
    return in_slices("interleaved_seq1f1b", unsliced, slices)


def in_slices(name: str, unsliced: Schedule, slices: int) -> Schedule:
    """Turn a schedule of m*k micro-batches into one of m micro-batches in k slices each."""
    ops = tuple(rank_ops(codes, slices) for codes in unsliced.ops)
    return Schedule(
        name=name,
        placement=unsliced.placement,
        microbatches=unsliced.microbatches // slices,
        ops=ops,
        activation_bound=tuple(map(most_held, ops)),
        slices=slices,
    )


def rank_ops(codes: "array[int]", slices: int) -> "array[int]":
    """Convert a rank's operations on m * `slices` micro-batches to operations on the slices of m
    micro-batches. Each backward moves behind the next `slices` - 1 forwards."""
    ahead = slices - 1
    forwards = [_slice_of(code, slices) for code in codes if code & KIND_MASK == Kind.F]
    ops = array("q", forwards[:ahead])
    started = ahead
    for code in codes:
        if code & KIND_MASK != Kind.F:
            ops.append(_slice_of(code, slices))
        elif started < len(forwards):
            ops.append(forwards[started])
            started += 1
    return ops


def _slice_of(code: int, slices: int) -> int:
    """Convert an operation of the schedule of m*k micro-batches to the operation on a slice."""
    microbatch, part = divmod(code >> MICROBATCH_SHIFT, slices)
    if code & KIND_MASK != Kind.F:
        part = slices - 1 - part
    return code & _LOW | microbatch << MICROBATCH_SHIFT | part << SLICE_SHIFT
