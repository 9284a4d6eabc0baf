"""Schedules on the V placement that trade idle time for memory (Qi et al., 2405.15362).

Rank r has stages r and 2p-1-r, so the model's input and its loss are both on rank 0. Each schedule
is a block (see :mod:`megapipe.schedule.generators.blocks`) that repeats every six slots and is then
reordered.
The *hops* of a micro-batch from stage to stage decide how long activations live: with shorter hops
fewer are alive, and there is more idle time before and after the steady state.

A slot is half of a rank's F, I or W, all equal; bubbles are those of the makespan for m >= 2p, and
1F1B's is 6(p-1). Peaks are in micro-batches of a full rank, from F to W. Any m can be executed.
Where a `cost` is given, weight gradients may move to where a rank would idle at that cost
(:func:`~megapipe.schedule.generators.reorder.refill`); no schedule gets longer by that.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators.blocks import BuildingBlock, drop_weights, repeat
from megapipe.schedule.generators.registry import register
from megapipe.schedule.generators.reorder import reorder
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import vee

PERIOD = 6


@register("v_min")
def v_min(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """V-Min: a third of 1F1B's activations.

    Bubble: 4p-5 slots, one less where p = 2 mod 3 (p = 2: 1, p = 3: 5). Peak: (p+4) div 3. Where
    times differ the bubble grows with m, as the way of a micro-batch has no slack.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("v_min", chunks)
    return _from_block("v_min", v_min_block(ranks), microbatches, cost)


@register("v_half")
def v_half(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """V-Half: half of 1F1B's activations and half of its bubble.

    Bubble: 3p-7 slots for even p, 3p-4 for odd p (p = 2: 1). Peak: (p+2) div 2. At a `cost` with
    2F <= W+2I and 2I <= W+2F the bubble stops growing with m.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("v_half", chunks)
    return _from_block("v_half", v_half_block(ranks), microbatches, cost)


@register("v_zb")
def v_zb(ranks: int, microbatches: int, chunks: int = 2, cost: Cost | None = None) -> Schedule:
    """V-ZB: no bubble in the span, made from the block of zb_v's steady state.

    Bubble: p-1 slots, and 0 within each rank's span. Peak: p. Forwards and input gradients are in
    the order of zb_v; weight gradients may not be.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("v_zb", chunks)
    return _from_block("v_zb", v_zb_block(ranks), microbatches, cost)


@register("1f1b_v")
def one_f_one_b_v(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B-V: two thirds of 1F1B's activations, with a fused backward of two slots per chunk.

    Bubble: 5p-5 slots where p = 1 mod 3 and 5p-7 where p = 2 mod 3 (p = 2: 4); near 5p-8 where 3
    divides p. Peak: 2p div 3 + 1.

    Raises:
        ScheduleError: chunks is not 2.
    """
    two_chunks("1f1b_v", chunks)
    return _from_block("1f1b_v", one_f_one_b_v_block(ranks), microbatches)


def v_min_block(ranks: int) -> BuildingBlock:
    """Every hop is one slot."""
    hops = [1] * (2 * ranks - 1)
    return drop_weights(vee_block(ranks, hops, 3 if ranks % 3 == 0 else 1, hops))


def v_half_block(ranks: int) -> BuildingBlock:
    """Hops of two slots down the ranks, of one slot up."""
    down, up = [2] * (ranks - 1), [1] * (ranks - 1)
    turn = 4 if ranks % 2 == 0 else 1
    return drop_weights(vee_block(ranks, [*down, 1, *up], turn, [*down, 2, *up]))


def v_zb_block(ranks: int) -> BuildingBlock:
    """Hops of four slots down the ranks, of two slots up."""
    hops = [4] * (ranks - 1) + [3] + [2] * (ranks - 1)
    return drop_weights(vee_block(ranks, hops, 1, hops))


def one_f_one_b_v_block(ranks: int) -> BuildingBlock:
    """Forwards hop one slot; backwards two, but five after every third, past the forwards."""
    forward = [1] * (2 * ranks - 1)
    backward = [5 if (hop + 2 - ranks) % 3 == 0 else 2 for hop in range(2 * ranks - 1)]
    return vee_block(ranks, forward, 4 if ranks % 3 == 0 else 1, backward, Kind.B)


def vee_block(
    ranks: int, forward: Sequence[int], turn: int, backward: Sequence[int], back: Kind = Kind.I
) -> BuildingBlock:
    """A block on the V, from the slots between the starts of operations that follow each other.

    Args:
        ranks: p.
        forward: from F of stage s to F of stage s+1; 2p-1 numbers.
        turn: from the last F to the first backward.
        backward: from the backward of stage 2p-1-s to that of the stage before; 2p-1 numbers.
        back: the backward: I, whose W are left out, or B.
    """
    stages = range(2 * ranks)
    outward = list(accumulate(forward, initial=0))
    inward = accumulate(backward, initial=outward[-1] + turn)
    slots = {Op(Kind.F, stage, 0): slot for stage, slot in zip(stages, outward, strict=True)}
    for stage, slot in zip(reversed(stages), inward, strict=True):
        slots[Op(back, stage, 0)] = slot
    return BuildingBlock(vee(ranks), PERIOD, slots)


def two_chunks(name: str, chunks: int) -> None:
    """ScheduleError for another number of chunks than a V has."""
    if chunks != 2:
        raise ScheduleError(
            f"schedule {name}: chunks must be 2, one on each side of the V, not {chunks}"
        )


def promised(schedule: Schedule) -> Schedule:
    """The schedule with its peak as its limit."""
    return replace(schedule, activation_bound=tuple(map(most_held, schedule.ops)))


def _from_block(
    name: str, block: BuildingBlock, microbatches: int, cost: Cost | None = None
) -> Schedule:
    return promised(reorder(repeat(block, microbatches, name), cost))
