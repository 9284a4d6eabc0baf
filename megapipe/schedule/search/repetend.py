"""Repetends: patterns of one operation per block that repeat in the steady state.

In a *repetend* (Tessel, 2311.15269) each block of a placement runs once, for different
micro-batches. Iteration t runs a block on micro-batch t - d, where d is the block's *delay* in
iterations. The time between iterations is the *period*. The number of micro-batches that a repetend
has in flight is its largest delay plus 1, its *depth*.

For one period, a constraint solver decides whether there is a repetend (software pipelining by
modulo scheduling). A longer period never makes that harder, so bisection finds the shortest one.
"""

import time
from typing import NamedTuple

from megapipe.schedule.search.blocks import Blocks, Starts
from megapipe.schedule.search.solver import Model, Variable, new_model, solved


class Repetend(NamedTuple):
    """One iteration of a steady state. Lists have an element for each block."""

    period: int
    """Time between iterations, in ticks."""
    offsets: list[int]
    """Start of each block after the start of its iteration: from 0 to `period` - 1."""
    delays: list[int]
    """Number of iterations by which each block is behind the first block of its micro-batch."""

    @property
    def depth(self) -> int:
        """Number of micro-batches in flight."""
        return 1 + max(self.delays)

    def starts(self, microbatches: int) -> Starts:
        """Return a schedule that only repeats: each micro-batch a period after the one before."""
        return [
            [offset + (delay + number) * self.period for number in range(microbatches)]
            for offset, delay in zip(self.offsets, self.delays, strict=True)
        ]


class Decision(NamedTuple):
    """The solver's answer to whether there is a repetend of some period and depth."""

    repetend: Repetend | None
    decided: bool
    """Whether the time was enough to know that there is one, or none."""


def one_by_one(blocks: Blocks) -> Repetend:
    """Return the repetend that runs one block after the other, with one micro-batch in flight."""
    return Repetend(blocks.serial, blocks.one_by_one, [0] * len(blocks.all))


def shorter(blocks: Blocks, depth: int, than: Repetend, seconds: float, stop: float) -> Decision:
    """Find the shortest repetend with at most `depth` micro-batches in flight, if it is shorter
    than `than`.

    Args:
        seconds: time limit of each call of the solver.
        stop: time (of ``time.monotonic``) at which the best one found so far is returned.
    """
    best, proved, low, period = than, True, blocks.work, blocks.work
    while low < best.period:
        if time.monotonic() > stop:
            proved = False
            break
        found, decided = of_period(blocks, depth, period, seconds)
        proved = proved and decided
        if found is None:
            low = period + 1
        else:
            best = found
        period = (low + best.period) // 2
    return Decision(None if best is than else best, proved)


def of_period(blocks: Blocks, depth: int, period: int, seconds: float) -> Decision:
    """Find a repetend of one period with at most `depth` micro-batches in flight."""
    model = new_model("repetend")
    offsets = [model.new_int_var(0, period - 1, "") for _ in blocks.all]
    delays = [model.new_int_var(0, depth - 1, "") for _ in blocks.all]
    model.add(delays[0] == 0)
    for before, after, lag in blocks.needs:
        wait = blocks.all[before].duration + lag
        model.add(
            offsets[after] + period * delays[after]
            >= offsets[before] + period * delays[before] + wait
        )
    for own in blocks.on:
        model.add_no_overlap(
            [
                model.new_fixed_size_interval_var(offsets[index] + turn, duration, "")
                for index in own
                if (duration := blocks.all[index].duration)
                for turn in (0, period)
            ]
        )
    if blocks.room is not None:
        _add_memory(model, blocks, period, (offsets, delays), depth, blocks.room)
    values, _, decided = solved(model, offsets + delays, seconds)
    if values is None:
        return Decision(None, decided)
    return Decision(Repetend(period, values[: len(offsets)], values[len(offsets) :]), True)


def _add_memory(
    model: Model,
    blocks: Blocks,
    period: int,
    pattern: tuple[list[Variable], list[Variable]],
    depth: int,
    room: list[int],
) -> None:
    """Add the memory limits: an activation is alive for a number of whole periods and a rest. Whole
    periods take memory all the time, the rest only in a part of each period."""
    offsets, delays = pattern
    whole: list[list[Variable]] = [[] for _ in blocks.on]
    rest: list[list[Variable]] = [[] for _ in blocks.on]
    amounts: list[list[int]] = [[] for _ in blocks.on]
    for forward, freeing in blocks.kept:
        block = blocks.all[freeing]
        periods = model.new_int_var(0, depth + 1, "")
        length = model.new_int_var(0, period - 1, "")
        end = offsets[freeing] + period * delays[freeing] + block.duration
        model.add(periods * period + length == end - offsets[forward] - period * delays[forward])
        intervals = []
        for turn in (0, period):
            start = offsets[forward] + turn
            stop = model.new_int_var(0, 3 * period, "")
            intervals.append(model.new_interval_var(start, length, stop, ""))
        for rank in block.ranks:
            whole[rank].append(-block.amount * periods)
            rest[rank] += intervals
            amounts[rank] += [-block.amount] * 2
    for rank, most in enumerate(room):
        left = model.new_int_var(0, most, "")
        model.add(left == most - sum(whole[rank]))
        model.add_cumulative(rest[rank], amounts[rank], left)
