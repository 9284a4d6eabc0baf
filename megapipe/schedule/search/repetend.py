"""Repetends: patterns of one operation per block that repeat in the steady state.

In a *repetend* (Tessel, 2311.15269) each block of a placement runs once, for different
micro-batches. Iteration t runs a block on micro-batch t - d, where d is the block's *delay* in
iterations. The time between iterations is the *period*. The number of micro-batches that a repetend
has in flight is its largest delay plus 1, its *depth*.

For one period, a constraint solver decides whether there is a repetend (software pipelining by
modulo scheduling). A longer period never makes it harder, so the shortest one is found by bisection.
"""

from typing import NamedTuple

from megapipe.schedule.search.blocks import Blocks, Starts
from megapipe.schedule.search.solver import Model, Variable, new_model, solved

MANY = 1 << 30


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


class Found(NamedTuple):
    """The result of the search for a repetend of limited depth."""

    repetend: Repetend
    proved: bool
    """Whether no repetend of this depth has a shorter period."""


def shortest(blocks: Blocks, depth: int, seconds: float) -> Found:
    """Find a repetend of minimal period with at most `depth` micro-batches in flight, and among
    these one in which a micro-batch takes the least time from its first to its last block.

    `seconds` limits each call of the solver.
    """
    best = Repetend(blocks.serial, blocks.one_by_one, [0] * len(blocks.all))
    low, proved = blocks.work, True
    while low < best.period:
        period = low if best.period == blocks.serial else (low + best.period) // 2
        found, decided = _of_period(blocks, depth, period, seconds, shorten=False)
        proved = proved and decided
        if found is None:
            low = period + 1
        else:
            best = found
    found, _ = _of_period(blocks, depth, best.period, seconds, shorten=True)
    return Found(found or best, proved)


def _of_period(
    blocks: Blocks, depth: int, period: int, seconds: float, *, shorten: bool
) -> tuple[Repetend | None, bool]:
    """Find a repetend of one period. Return it, or None, and whether the solver has decided."""
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
        _add_memory(model, blocks, period, offsets, delays, blocks.room)
    if shorten:
        end = model.new_int_var(0, depth * period + max(b.duration for b in blocks.all), "")
        for block, offset, delay in zip(blocks.all, offsets, delays, strict=True):
            model.add(end >= offset + period * delay + block.duration)
        model.minimize(end - offsets[0])
    values, _, decided = solved(model, offsets + delays, seconds)
    if values is None:
        return None, decided
    return Repetend(period, values[: len(offsets)], values[len(offsets) :]), decided


def _add_memory(
    model: Model,
    blocks: Blocks,
    period: int,
    offsets: list[Variable],
    delays: list[Variable],
    room: list[int],
) -> None:
    """Add the memory limits: an activation is alive for a number of whole periods and a rest. Whole
    periods take memory all the time, the rest only in a part of each period."""
    whole: list[list[Variable]] = [[] for _ in blocks.on]
    rest: list[list[Variable]] = [[] for _ in blocks.on]
    amounts: list[list[int]] = [[] for _ in blocks.on]
    for forward, freeing in blocks.kept:
        block = blocks.all[freeing]
        periods = model.new_int_var(0, MANY, "")
        length = model.new_int_var(0, period - 1, "")
        end = offsets[freeing] + period * delays[freeing] + block.duration
        model.add(periods * period + length == end - offsets[forward] - period * delays[forward])
        stop = model.new_int_var(0, 2 * period, "")
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
