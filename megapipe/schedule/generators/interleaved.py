r"""Interleaved 1F1B (Narayanan et al., 2104.04473) for any group size and any m.

Chunk c of rank r is stage c*p + r. The micro-batches are cut into groups of g (the last may be
shorter, g'), and each rank runs its V = m*v forwards in the order of one table: for each group,
for each chunk, for each micro-batch of the group; for backwards the chunks are reversed.
Before forward k of a rank come exactly the backwards with indices below max(0, k - w(k)), with

    w(k) = (v-1) g + e(k),   e(k) = min(f q, d(k) + a),   q = p-1-r,   a = min(q, g)

where d(k) is the size of forward k's group (g, or g' in the last), and f is 2 for g >= p, else 1.
Megatron-LM requires p <= g <= m, and g' >= p or no shorter group. Within these limits e = 2 q, and
both the table and the warm-up are Megatron-LM's. Outside them Megatron-LM's warm-up can deadlock:
forward k of a later chunk on rank 0 needs forward k - d(k) of the last rank, so rank 0 must not be
ahead by much more than a group; min(.., d + a) bounds that. With g < p the factor 1 gives the
shorter step as well as the smaller peak (p = 4, m = 12, v = 2, g = 3, unit costs: 84 instead of
111).

Why it never deadlocks. Give backward i of rank r the time (i + a, 1, i) and forward k the time
(k - w(k) + a, 0, k), ordered as tuples and, where those are equal, by rank (forwards ascending,
backwards descending). Every operation then comes after all that it needs:

- list order: forward k comes after backward k - w(k) - 1 and before backward k - w(k);
- forward k of rank r after that of r-1: e - a = min(f q - a, d) does not grow with r;
- forward k of rank 0 after forward k - d of rank p-1 (which has e = a = 0): e - a <= d;
- backward i of rank r after that of r+1: a does not grow with r;
- backward i of rank p-1 after backward i - d of rank 0: a <= g = d, with the smaller index first;
- backward i after the forward of the same stage, at most (v-1) g later in the table.

In a shorter last group d = g' may be less than a. But the group's backwards of all chunks but the
first in the table, i >= V - (v-1) g', come after every forward on every rank. They can have times
after all other operations.
"""

from array import array

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.one_f_one_b import one_f_one_b
from megapipe.schedule.generators.op_lists import in_groups
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.placement import loop


@register("interleaved_1f1b")
def interleaved_1f1b(
    ranks: int, microbatches: int, chunks: int = 2, microbatch_group_size: int | None = None
) -> Schedule:
    """Run 1F1B over several chunks per rank; larger groups make it more breadth-first.

    Idle time, for a group size g = p that divides m: (p-1)(F+B)/v, where F and B are the times of
    1/p of the model. Peak on rank r: min(m v, (v-1) g + 2(p-1-r) + 1) chunk activations within
    Megatron-LM's limits (p <= g, and m mod g is 0 or at least p). With one chunk it is plain 1F1B,
    whose warm-up has no factor 2.

    Args:
        microbatch_group_size: g, micro-batches per group, 1 to microbatches; default min(ranks,
            microbatches).

    Raises:
        ScheduleError: microbatch_group_size out of range.
    """
    group = min(ranks, microbatches) if microbatch_group_size is None else microbatch_group_size
    if not 1 <= group <= microbatches:
        raise ScheduleError(
            "schedule interleaved_1f1b: microbatch_group_size must be from 1 to microbatches = "
            f"{microbatches}, not {group}"
        )
    if chunks == 1:
        plain = one_f_one_b(ranks, microbatches)
        return Schedule(
            "interleaved_1f1b", plain.placement, microbatches, plain.ops, plain.activation_bound
        )
    return Schedule(
        name="interleaved_1f1b",
        placement=loop(ranks, chunks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, ranks, microbatches, chunks, group) for rank in range(ranks)),
        activation_bound=tuple(
            max(
                min(stop, ahead + 1)
                for stop, ahead in _phases(rank, ranks, microbatches, chunks, group)
            )
            for rank in range(ranks)
        ),
    )


def rank_ops(rank: int, ranks: int, microbatches: int, chunks: int, group: int) -> "array[int]":
    """Return the operations of one rank that has at least two chunks, in order."""
    stages = range(rank, ranks * chunks, ranks)
    forwards = in_groups(Kind.F, stages, microbatches, group)
    backwards = in_groups(Kind.B, stages[::-1], microbatches, group)
    ops = array("q")
    start = done = 0
    for stop, ahead in _phases(rank, ranks, microbatches, chunks, group):
        for index in range(start, stop):
            while done < index - ahead:
                ops.append(backwards[done])
                done += 1
            ops.append(forwards[index])
        start = stop
    ops.extend(backwards[done:])
    return ops


def _phases(
    rank: int, ranks: int, microbatches: int, chunks: int, group: int
) -> list[tuple[int, int]]:
    """Return pairs (stop, w): w is w(k) of the module's docstring, for the forwards k below `stop`
    and in no earlier pair. One pair is for the full groups, another for a shorter last group."""
    to_last = ranks - 1 - rank
    lead = 2 * to_last if group >= ranks else to_last
    short = microbatches % group
    sizes = [(microbatches - short, group)] + ([(microbatches, short)] if short else [])
    return [
        (end * chunks, (chunks - 1) * group + min(lead, size + min(to_last, group)))
        for end, size in sizes
    ]
