"""Properties of schedules from which lower bounds of layouts are computed."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from megapipe.config.config import Config
from megapipe.errors import ScheduleError
from megapipe.plan.search.layouts import LayoutChoice
from megapipe.schedule.ir import Kind, Schedule, unpack
from megapipe.schedule.load import is_user_schedule, load
from megapipe.schedule.memory import peak_weighted
from megapipe.schedule.placement import Placement


class Pipeline(NamedTuple):
    """Properties of a schedule from which bounds are computed, in a step with few micro-batches;
    with more of them, no peak is lower."""

    placement: Placement
    stages: Sequence[Sequence[Sequence[int]]]
    """Stages of each rank, by direction."""
    holders: Sequence[int]
    """Number of ranks that hold each stage."""
    shares: Sequence[float]
    """Size of each stage; the unit is 1 / ranks of the model."""
    peaks: Sequence[float]
    """Peak activations of each rank, held from F to I, in micro-batches. The unit is a
    micro-batch's activations in 1 / ranks of the model."""
    is_fused: bool
    """Whether all backwards are fused (B)."""
    recompute: frozenset[int]
    """Stages that the schedule recomputes."""
    smallest: float
    """Size of the smallest part into which micro-batches are cut; 1 if they are whole."""

    in_flight: float | None
    """Upper bound of the micro-batches that are between the F and the I of the first stage on a
    rank; None if the stage recomputes, as its activations then live shorter."""


def pipeline_of(config: Config, choice: LayoutChoice, microbatches: int) -> Pipeline | None:
    """Describe the schedule of a layout.

    Return None if nothing is known before the layout is resolved: the schedule cuts sequences,
    never flushes, or is user-defined; or it cannot be made.
    """
    name, pp = choice.schedule, choice.pp
    given = config.pipeline.arguments
    is_cut = given.get("slices") is not None
    is_async = config.pipeline.weight_versions != "synchronous"
    if is_user_schedule(name) or name == "auto" or is_cut or is_async:
        return None
    if choice.chunks is not None and choice.chunks > 1:
        given = {**given, "chunks": choice.chunks}
    known = {option: value for option, value in given.items() if value is not None}
    try:
        return _pipeline(name, pp, min(microbatches, 2 * pp), **known)
    except (ScheduleError, TypeError):  # TypeError: an option that cannot be hashed
        return None


@lru_cache(maxsize=1024)
def _pipeline(name: str, ranks: int, microbatches: int, **options: Any) -> Pipeline | None:
    made = load(name, ranks=ranks, microbatches=microbatches, **options)
    if made.slices > 1:
        return None
    placement = made.placement
    peaks = [float(peak) for peak in peak_weighted(made, freed=Fraction(1))]
    shares = [float(share) for share in placement.stage_shares]
    first = max(peaks[rank] for rank in placement.holders(0)) / shares[0]
    return Pipeline(
        placement=placement,
        stages=[
            [[stage for stage, at in enumerate(row) if at == rank] for row in placement.table]
            for rank in range(ranks)
        ],
        holders=[len(placement.holders(stage)) for stage in range(placement.stages)],
        shares=shares,
        peaks=peaks,
        is_fused=_is_fused(made),
        recompute=made.recompute,
        smallest=float(min(made.sizes or [Fraction(1)])),
        in_flight=None if 0 in made.recompute else max(first, 1.0),
    )


def _is_fused(schedule: Schedule) -> bool:
    return not any(unpack(code).kind is Kind.I for ops in schedule.ops for code in ops)
