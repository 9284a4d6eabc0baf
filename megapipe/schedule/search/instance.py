"""Checks of the arguments of a search, and the search problem that they define."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, get_args

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.placement import Placement
from megapipe.schedule.search.blocks import Blocks
from megapipe.schedule.search.bound import cheapest, least
from megapipe.schedule.search.problem import Objective, Problem

Accounting = Literal["held", "weighted"]
MemoryLimit = Time | Sequence[Time] | None


def instance(
    placement: Placement,
    microbatches: int,
    cost: Cost,
    *,
    activation_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    objective: Objective = "makespan",
    fused: bool = False,
) -> Problem:
    """Return the search problem for these arguments of :func:`~megapipe.schedule.search.search`.

    If `fused`, its orders have fused backwards (B), otherwise I and W.

    Raises:
        ScheduleError: an argument is out of range.
    """
    check_microbatches(microbatches)
    _check_choice("objective", objective, Objective)
    return Problem(
        placement,
        microbatches,
        replace(cost, jitter=0.0),
        limits=_limits(placement.ranks, activation_limit),
        freed=_counted_freed(accounting, freed),
        objective=objective,
        fused=fused,
    )


def blocks_of(
    placement: Placement,
    cost: Cost,
    *,
    activation_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    fused: bool = False,
) -> Blocks:
    """Return the blocks of a micro-batch, for the searches by a constraint solver.

    The arguments are described at :func:`instance`; stages may span all ranks.

    Raises:
        ScheduleError: an argument is out of range, a cost is a float, gathers or reductions take
            time, or no order keeps the limit.
    """
    if cost.has_replicas(placement.stages):
        raise ScheduleError("search: a solver needs gathers and reductions that take no time")
    limits = _limits(placement.ranks, activation_limit)
    least = least_limit(placement)
    if limits is not None and min(limits) < least:
        raise ScheduleError(
            f"search: activation_limit {activation_limit} is too small; it must be at least "
            f"{least}, so that one micro-batch can pass all stages"
        )
    share = _counted_freed(accounting, freed)
    return Blocks(placement, cost, limits=limits, freed=share, fused=fused)


def check_microbatches(microbatches: int) -> None:
    """Check that there is a micro-batch.

    Raises:
        ScheduleError: there is none.
    """
    if microbatches < 1:
        raise ScheduleError(f"search: microbatches must be at least 1, not {microbatches}")


def _counted_freed(accounting: Accounting, freed: Time) -> Fraction:
    """Return the share of an activation that an I frees, as `accounting` counts it."""
    _check_choice("accounting", accounting, Accounting)
    share = _number("freed", freed)
    if not 0 <= share <= 1:
        raise ScheduleError(f"search: freed must be from 0 to 1, not {freed}")
    return share if accounting == "weighted" else Fraction(0)


def lower_bound(
    placement: Placement,
    microbatches: int,
    cost: Cost,
    *,
    activation_limit: MemoryLimit = None,
    accounting: Accounting = "held",
    freed: Time = 0,
    objective: Objective = "makespan",
) -> Time:
    """Return a time that no schedule on a placement can beat, with fused or split backwards.

    It is cheap to compute, and near the optimum for many micro-batches and enough memory
    (:func:`~megapipe.schedule.search.bound.least`). The arguments are described at
    :func:`~megapipe.schedule.search.search`.

    Raises:
        ScheduleError: an argument is out of range.
    """
    problem = instance(
        placement,
        microbatches,
        cheapest(cost, placement.stages),
        activation_limit=activation_limit,
        accounting=accounting,
        freed=freed,
        objective=objective,
    )
    return least(problem)


def least_limit(placement: Placement) -> Fraction:
    """Return the smallest activation_limit for all ranks with which a step can run: the first
    micro-batch passes all stages forward before any activation is freed."""
    return placement.stage_shares[0] * max(
        len(placement.stages_of(rank)) for rank in range(placement.ranks)
    )


def can_run(problem: Problem) -> bool:
    """Whether each rank has memory for the activations of one micro-batch at all its stages."""
    grain = problem.amount[0]
    return all(
        len(chunks) * grain <= room
        for chunks, room in zip(problem.chunks, problem.room, strict=True)
    )


def _limits(ranks: int, activation_limit: MemoryLimit) -> tuple[Fraction, ...] | None:
    if activation_limit is None:
        return None
    if isinstance(activation_limit, Sequence):
        if len(activation_limit) != ranks:
            raise ScheduleError(
                f"search: {len(activation_limit)} memory limits for {ranks} ranks; give one per "
                "rank or one for all"
            )
        return tuple(_number("activation_limit", limit) for limit in activation_limit)
    return (_number("activation_limit", activation_limit),) * ranks


def _number(name: str, value: Time) -> Fraction:
    try:
        return Fraction(value)
    except (ValueError, OverflowError):
        raise ScheduleError(f"search: {name} must be a number, not {value}") from None


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        known = " or ".join(get_args(choices))
        raise ScheduleError(f"search: {name} must be {known}, not {value!r}")
