"""ZB-V: zero bubble at the memory of 1F1B, on the V placement (Qi et al., 2401.10241, section 6).

Rank r of p has chunk 0 (stage r) and chunk 1 (stage 2p-1-r). F0 is a forward of chunk 0. The list
of rank r is

  1. 2(p-r)-1 times F0;
  2. r times F1 F0;
  3. p-r times F1 I1 W1;
  4. m-p times F0 I0 W0 F1 I1 W1; the last p-r-1 times lack F0, as all F0 have run;
  5. r times I0 I1;
  6. p-r times I0 W0;
  7. r times W1, then r times W0.
"""

from array import array
from collections import Counter

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators.op_lists import weave
from megapipe.schedule.generators.registry import register
from megapipe.schedule.generators.reorder import refill_valid
from megapipe.schedule.generators.v_family import promised, two_chunks
from megapipe.schedule.ir import MICROBATCH_SHIFT, Kind, Schedule, packed, span
from megapipe.schedule.placement import vee


@register("zb_v")
def zb_v(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """Run ZB-V: no rank idles between its first and last operation; input and loss are on rank 0.

    At equal times and m >= 2p-1 the bubble within each rank's span is 0; the bubble of the makespan
    is p-1 times F of one chunk. Peak: p micro-batches (2p chunk activations) on every rank, from F
    to W. For m < 2p-1 the schedule is made for 2p-1 micro-batches, and the excess ones are omitted.

    If m < 2p-1, weight gradients can move to where a rank would idle at equal times
    (:func:`~megapipe.schedule.generators.reorder.refill`); with a `cost`, also to where it would
    idle at this cost. This raises neither the makespan at this cost nor the peak.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("zb_v", chunks)
    schedule = Schedule(
        name="zb_v",
        placement=vee(ranks),
        microbatches=microbatches,
        ops=tuple(rank_ops(rank, ranks, microbatches) for rank in range(ranks)),
        activation_bound=(2 * ranks,) * ranks,
    )
    if microbatches < 2 * ranks - 1:
        schedule = promised(refill_valid(schedule, Cost()))
    return promised(refill_valid(schedule, cost)) if cost else schedule


def rank_ops(rank: int, ranks: int, microbatches: int) -> "array[int]":
    """Return the operations of one rank, in order."""
    count = max(microbatches, 2 * ranks - 1)
    down, up = rank, 2 * ranks - 1 - rank
    f0, i0, w0 = (span(kind, down, 0, count) for kind in (Kind.F, Kind.I, Kind.W))
    f1, i1, w1 = (span(kind, up, 0, count) for kind in (Kind.F, Kind.I, Kind.W))
    above = ranks - rank
    phases = (
        (2 * above - 1, (f0,)),
        (rank, (f1, f0)),
        (above, (f1, i1, w1)),
        (count - ranks - above + 1, (f0, i0, w0, f1, i1, w1)),
        (above - 1, (i0, w0, f1, i1, w1)),
        (rank, (i0, i1)),
        (above, (i0, w0)),
        (rank, (w1,)),
        (rank, (w0,)),
    )
    ops = array("q")
    done: Counter[range] = Counter()
    for rounds, columns in phases:
        ops.extend(weave(*(codes[done[codes] : done[codes] + rounds] for codes in columns)))
        done.update(dict.fromkeys(columns, rounds))
    if microbatches < count:
        ops = packed(code for code in ops if code >> MICROBATCH_SHIFT < microbatches)
    return ops
