"""Schedules on the V placement that trade idle time for memory (Qi et al., 2405.15362).

Rank r has stages r and 2p-1-r, so the model's input and its loss are both on rank 0. Each schedule
is a building block (:mod:`megapipe.schedule.generators.blocks`), repeated every six time slots and
then reordered.

A *hop* is the time from the start of a micro-batch's operation at one stage to its start at the
next stage. Hops decide how long activations live: with shorter hops fewer activations are alive,
and there is more idle time before and after the steady state.

A time slot is the F, I or W of one chunk; all are equally long. A bubble is the number of time
slots of the makespan in which a rank idles, for m >= 2p; 1F1B's is 6(p-1). A peak counts
micro-batches from F to W; two chunk activations are one micro-batch. Any m can be executed. With a
`cost`, weight gradients can move to where a rank would idle at this cost
(:func:`~megapipe.schedule.generators.reorder.refill`). No schedule gets longer by that.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators.blocks import BuildingBlock, place_weight_grads, repeat
from megapipe.schedule.generators.registry import register
from megapipe.schedule.generators.reorder import reorder
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import vee

PERIOD = 6


@register("v_min")
def v_min(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """Run V-Min: a third of 1F1B's activations.

    Bubble: 4p-5 slots, one less if p = 2 mod 3 (exceptions: 1 for p = 2, 5 for p = 3). Peak: (p+4)
    div 3 micro-batches. If times differ the bubble grows with m, as the path of a micro-batch has
    no slack.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("v_min", chunks)
    return _from_block("v_min", v_min_block(ranks), microbatches, cost)


@register("v_half")
def v_half(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """Run V-Half: half of 1F1B's activations and half of its bubble.

    Bubble: 3p-7 slots for even p (1 for p = 2), 3p-4 for odd p. Peak: (p+2) div 2 micro-batches. At
    a `cost` with 2F <= W+2I and 2I <= W+2F the bubble stops growing at some m.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("v_half", chunks)
    return _from_block("v_half", v_half_block(ranks), microbatches, cost)


@register("v_zb")
def v_zb(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """Run V-ZB, the building block of zb_v's steady state: ranks idle only before their first and
    after their last operation.

    Bubble: p-1 slots of the makespan, and 0 between a rank's first and last operation. Peak: p
    micro-batches. Forwards and input gradients are in the order of zb_v; weight gradients may
    differ.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("v_zb", chunks)
    return _from_block("v_zb", v_zb_block(ranks), microbatches, cost)


@register("1f1b_v")
def one_f_one_b_v(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Run 1F1B-V: two thirds of 1F1B's activations, with fused backwards.

    A backward takes two time slots. Bubble: 5p-5 slots if p = 1 mod 3, 5p-7 if p = 2 mod 3 (4 for p
    = 2), and near 5p-8 if 3 divides p. Peak: 2p div 3 + 1 micro-batches.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("1f1b_v", chunks)
    return _from_block("1f1b_v", one_f_one_b_v_block(ranks), microbatches)


def v_min_block(ranks: int) -> BuildingBlock:
    """Make V-Min's building block: every hop from stage to stage takes one time slot."""
    hops = [1] * (2 * ranks - 1)
    return place_weight_grads(vee_block(ranks, hops, 3 if ranks % 3 == 0 else 1, hops))


def v_half_block(ranks: int) -> BuildingBlock:
    """Make V-Half's building block: hops take two time slots down the ranks, and one slot up."""
    down, up = [2] * (ranks - 1), [1] * (ranks - 1)
    turn = 4 if ranks % 2 == 0 else 1
    return place_weight_grads(vee_block(ranks, [*down, 1, *up], turn, [*down, 2, *up]))


def v_zb_block(ranks: int) -> BuildingBlock:
    """Make V-ZB's building block: hops take four time slots down the ranks, and two slots up."""
    hops = [4] * (ranks - 1) + [3] + [2] * (ranks - 1)
    return place_weight_grads(vee_block(ranks, hops, 1, hops))


def one_f_one_b_v_block(ranks: int) -> BuildingBlock:
    """Make 1F1B-V's building block: hops of forwards take one time slot, hops of backwards two, but
    every third hop of backwards takes five."""
    forward = [1] * (2 * ranks - 1)
    backward = [5 if (hop + 2 - ranks) % 3 == 0 else 2 for hop in range(2 * ranks - 1)]
    return vee_block(ranks, forward, 4 if ranks % 3 == 0 else 1, backward, Kind.B)


def vee_block(
    ranks: int, forward: Sequence[int], turn: int, backward: Sequence[int], back: Kind = Kind.I
) -> BuildingBlock:
    """Make a building block on the V from the distances, in time slots, between successive starts.

    Args:
        ranks: number of ranks, p.
        forward: 2p-1 distances; the one at index s is from the F of stage s to that of stage s+1.
        turn: distance from the last F to the first backward.
        backward: 2p-1 distances; the one at index s is from the backward of stage 2p-1-s to that of
            stage 2p-2-s.
        back: kind of the backward: I (W get no slots) or B.
    """
    stages = range(2 * ranks)
    outward = list(accumulate(forward, initial=0))
    inward = accumulate(backward, initial=outward[-1] + turn)
    slots = {Op(Kind.F, stage, 0): slot for stage, slot in zip(stages, outward, strict=True)}
    for stage, slot in zip(reversed(stages), inward, strict=True):
        slots[Op(back, stage, 0)] = slot
    return BuildingBlock(vee(ranks), PERIOD, slots)


def two_chunks(name: str, chunks: int) -> None:
    """Raise ScheduleError unless there are 2 chunks per rank, as on a V."""
    if chunks != 2:
        raise ScheduleError(
            f"schedule {name}: chunks must be 2, one on each side of the V, not {chunks}"
        )


def promised(schedule: Schedule) -> Schedule:
    """Return the schedule with each rank's peak as activation_bound."""
    return replace(schedule, activation_bound=tuple(map(most_held, schedule.ops)))


def _from_block(
    name: str, block: BuildingBlock, microbatches: int, cost: Cost | None = None
) -> Schedule:
    return promised(reorder(repeat(block, microbatches, name), cost))
