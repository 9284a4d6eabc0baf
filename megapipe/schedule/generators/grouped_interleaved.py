"""Interleaved 1F1B with the smallest warm-up and a split backward (PipeOffload, 2503.01328)."""

from array import array

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.lists import in_groups, weave
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import MICROBATCH_SHIFT, Kind, Schedule, packed
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop


@register("grouped_interleaved")
def grouped_interleaved(
    ranks: int, microbatches: int, chunks: int = 2, group: int | None = None
) -> Schedule:
    """F, I and W in turn over the chunks, in groups of p/2 to p micro-batches.

    Groups and chunks follow each other as in interleaved_1f1b, with one forward less ahead per
    rank, and every W comes right after its I, whose gradient is sent before W runs. Idle time, for
    g = p dividing m: (p-1)(F+I)/v, with F and I those of a full rank, whatever the times are. Peak,
    for two chunks and m >= g: (g + p)/2 micro-batches, so p for g = p, and 3p/4 for g = p/2, which
    has more idle time.

    The proof of interleaved_1f1b that it can be executed holds for the warm-up (v-1) g + p-1-r too,
    as g is at least half of the p ranks. Where g does not divide m, the list is that of the next
    multiple, without the micro-batches that are not there.

    Args:
        group: micro-batches per group, from p/2 (rounded up) to p; default p.

    Raises:
        ScheduleError: group out of range.
    """
    group = ranks if group is None else group
    least = -(-ranks // 2)
    if not least <= group <= ranks:
        raise ScheduleError(
            f"schedule grouped_interleaved: group must be from {least} to {ranks}, half of the "
            f"ranks to all, not {group}"
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
    """The list of one rank."""
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
