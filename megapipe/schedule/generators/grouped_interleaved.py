"""Interleaved 1F1B with the smallest warm-up and a split backward (PipeOffload, 2503.01328)."""

from array import array

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.op_lists import in_groups, weave
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import MICROBATCH_SHIFT, Kind, Schedule, packed
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop


@register("grouped_interleaved")
def grouped_interleaved(
    ranks: int, microbatches: int, chunks: int = 2, microbatch_group_size: int | None = None
) -> Schedule:
    """Run F, I and W in turn over the chunks, in groups of p/2 to p micro-batches.

    Groups and chunks follow each other as in interleaved_1f1b, but each rank has only one warm-up
    forward more than the next rank. Every W comes directly after its I; the gradient of the I is
    sent before W runs. Idle time, for a group size g = p that divides m: (p-1)(F+I)/v, where F and
    I are the times of 1/p of the model. Peak, for two chunks and m >= g: (g + p)/2 micro-batches.
    So g = p/2 lowers the peak from p to 3p/4, but has more idle time.

    The proof that interleaved_1f1b can be executed also holds for this warm-up of (v-1) g + p-1-r
    forwards, as g >= p/2. If g does not divide m, the schedule is made for the next multiple of g,
    and the excess micro-batches are omitted.

    Args:
        microbatch_group_size: g, micro-batches per group, from p/2 (rounded up) to p; default p.

    Raises:
        ScheduleError: microbatch_group_size out of range.
    """
    group = ranks if microbatch_group_size is None else microbatch_group_size
    least = -(-ranks // 2)
    if not least <= group <= ranks:
        raise ScheduleError(
            f"schedule grouped_interleaved: microbatch_group_size must be from {least} to {ranks}, "
            f"half of the ranks to all, not {group}"
        )
    ops = tuple(rank_ops(rank, ranks, microbatches, chunks, group) for rank in range(ranks))
    return Schedule(
        name="grouped_interleaved",
        placement=loop(ranks, chunks),
        microbatches=microbatches,
        ops=ops,
        activation_bound=tuple(map(most_held, ops)),
    )


def rank_ops(rank: int, ranks: int, microbatches: int, chunks: int, group: int) -> "array[int]":
    """Return the operations of one rank, in order."""
    stages = range(rank, ranks * chunks, ranks)
    whole = -(-microbatches // group) * group
    forwards = in_groups(Kind.F, stages, whole, group)
    inputs, weights = (in_groups(kind, stages[::-1], whole, group) for kind in (Kind.I, Kind.W))
    ahead = (chunks - 1) * group + ranks - 1 - rank
    steady = max(0, len(forwards) - ahead)
    ops = forwards[:ahead]
    ops.extend(weave(forwards[ahead:], inputs[:steady], weights[:steady]))
    ops.extend(weave(inputs[steady:], weights[steady:]))
    if whole > microbatches:
        ops = packed(code for code in ops if code >> MICROBATCH_SHIFT < microbatches)
    return ops
