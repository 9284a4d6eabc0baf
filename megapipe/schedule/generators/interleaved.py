r"""Interleaved 1F1B (Narayanan et al., 2104.04473) for any group size and any m.

Chunk c of rank r is stage c*p + r. The micro-batches are cut into groups of g (the last may be
shorter, g'), and each rank runs its V = m*v forwards in the order of one table: for each group,
for each chunk, for each micro-batch of the group; backwards likewise with the chunks reversed.
Before forward k of a rank come exactly the backwards below max(0, k - w(k)), with

    w(k) = (v-1) g + e(k),   e(k) = min(f q, d(k) + a),   q = p-1-r,   a = min(q, g)

where d(k) is the size of the group of k (g, or g' in the last), and f is 2 for g >= p, else 1. The
limits of Megatron-LM are p <= g <= m, and g' >= p or no shorter group; there e = 2 q, and both its
table and its warm-up are reproduced. Elsewhere its warm-up can deadlock: forward k of a later chunk
on rank 0 needs forward k - d(k) of the last rank, so rank 0 must not be ahead by much more than a
group; min(.., d + a) bounds that. With g < p the factor 1 gives the shorter step as well as the
smaller peak (p = 4, m = 12, v = 2, g = 3, unit costs: 84 instead of 111).

Why it never deadlocks. Give backward i of rank r the time (i + a, 1, i) and forward k the time
(k - w(k) + a, 0, k), ordered as tuples and, where those are equal, by rank (forwards ascending,
backwards descending). Every operation then comes after all that it needs:

- list order: forward k comes after backward k - w(k) - 1 and before backward k - w(k);
- forward k of rank r after that of r-1: e - a = min(f q - a, d) does not grow with r;
- forward k of rank 0 after forward k - d of rank p-1 (which has e = a = 0): e - a <= d;
- backward i of rank r after that of r+1: a does not grow with r;
- backward i of rank p-1 after backward i - d of rank 0: a <= g = d, with the smaller index first;
- backward i after the forward of the same stage, at most (v-1) g later in the table.

In a shorter last group d = g' may be less than a, but there the backwards of a later position
than the first chunk, i >= V - (v-1) g', come after every forward on every rank, and can be given
times after all others.
"""

from array import array

from megapipe.errors import ScheduleError
from megapipe.schedule.generators.lists import in_groups
from megapipe.schedule.generators.one_f_one_b import one_f_one_b
from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.placement import loop


@register("interleaved_1f1b")
def interleaved_1f1b(
    ranks: int, microbatches: int, chunks: int = 2, group: int | None = None
) -> Schedule:
    """1F1B over several chunks per rank; group runs from depth-first to breadth-first.

    Idle time, for g = p dividing m: (p-1)(F+B)/v, with F and B those of a full rank. Peak on
    rank r: min(V, (v-1) g + 2(p-1-r) + 1) chunk activations where Megatron-LM's limits hold.
    One chunk is 1F1B itself (its warm-up has no factor 2).

    Args:
        group: micro-batches per group, 1 to microbatches; default min(ranks, microbatches).

    Raises:
        ScheduleError: group out of range.
    """
    group = min(ranks, microbatches) if group is None else group
    if not 1 <= group <= microbatches:
        raise ScheduleError(
            f"schedule interleaved_1f1b: group must be from 1 to microbatches = {microbatches}, "
            f"not {group}"
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
    """The list of one rank with at least two chunks."""
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
    """(end in the forward table, w) of the full groups and of the shorter last group, if any."""
    to_last = ranks - 1 - rank
    lead = 2 * to_last if group >= ranks else to_last
    short = microbatches % group
    sizes = [(microbatches - short, group)] + ([(microbatches, short)] if short else [])
    return [
        (end * chunks, (chunks - 1) * group + min(lead, size + min(to_last, group)))
        for end, size in sizes
    ]
