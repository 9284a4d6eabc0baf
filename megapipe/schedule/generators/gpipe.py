"""GPipe (Huang et al., 1811.06965): all forwards, then all backwards."""

from array import array
from fractions import Fraction

from megapipe.schedule.generators.registry import register
from megapipe.schedule.ir import SLICE_SHIFT, Kind, Schedule, span
from megapipe.schedule.placement import Placement, loop


@register("gpipe")
def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Run all forwards, then all backwards, on the loop placement.

    The backwards run in micro-batch order (the paper reverses it). Bubble: (p-1)/(m+p-1) of the
    makespan; with v chunks this is the breadth-first order (Lamy-Poirier, 2211.05953), and the idle
    time is divided by v if m >= p. Peak: all m micro-batches.
    """
    return gpipe_on(loop(ranks, chunks), microbatches)


def gpipe_on(
    placement: Placement,
    microbatches: int,
    *,
    direction: tuple[int, ...] | None = None,
    slices: int = 1,
    sizes: tuple[Fraction, ...] | None = None,
) -> Schedule:
    """Run all forwards, then all backwards, on any placement.

    The result is the reference for every schedule on the placement with the same `direction`,
    `slices` and `sizes` (see :class:`~megapipe.schedule.ir.Schedule`). All lists are subsequences
    of one global order: forwards by stage, then backwards by descending stage. Within a stage they
    are sorted by micro-batch, with slices ascending forward and descending backward. In this order
    no operation comes before its inputs, so the schedule can always be executed.

    Raises:
        ScheduleError: `direction`, `slices` or `sizes` has a wrong length or an invalid value.
    """
    rows = direction or (0,) * microbatches
    ops = tuple(rank_ops(rank, placement, rows, slices) for rank in range(placement.ranks))
    return Schedule(
        name="gpipe",
        placement=placement,
        microbatches=microbatches,
        ops=ops,
        activation_bound=tuple(len(codes) // 2 for codes in ops),
        direction=direction,
        slices=slices,
        sizes=sizes,
    )


def rank_ops(
    rank: int, placement: Placement, direction: tuple[int, ...], slices: int
) -> "array[int]":
    """Return the operations of one rank; `direction` has the direction of each micro-batch."""
    stages, parts = placement.stages_of(rank), range(slices)
    ops = array("q")
    for kind, order, within in (
        (Kind.F, stages, parts),
        (Kind.B, reversed(stages), reversed(parts)),
    ):
        offsets = [part << SLICE_SHIFT for part in within]
        for stage in order:
            held = {row for row, at in enumerate(placement.table) if at[stage] == rank}
            codes = zip(span(kind, stage, 0, len(direction)), direction, strict=True)
            ops.extend(code + offset for code, row in codes if row in held for offset in offsets)
    return ops
