"""The operations of one micro-batch on any placement, as plain tables for a constraint solver.

A *block* is one operation of a micro-batch (Tessel, 2311.15269). It occupies one rank, or all ranks
at once if it is the F, B or I of a spanning stage. Every micro-batch has the same blocks, so a
schedule is a start time for each block and micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import floor
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time, plain
from megapipe.schedule.ir import Kind, Schedule, pack, packed
from megapipe.schedule.placement import Placement
from megapipe.schedule.timing.times import check_spanning, in_ticks

Starts = Sequence[Sequence[int]]
"""starts[block][microbatch] is the start of a block."""


class Block(NamedTuple):
    """One operation of a micro-batch."""

    kind: Kind
    stage: int
    ranks: tuple[int, ...]
    """The ranks that it occupies at once."""
    duration: int
    """Time in ticks (:mod:`megapipe.schedule.timing.ticks`), as all times of blocks."""
    amount: int
    """Change of the memory for activations on each of its ranks. A unit is 1 / n of an activation,
    where n is the denominator of `freed`."""


class Need(NamedTuple):
    """A block waits for another one of its micro-batch. Blocks are given by their indices."""

    before: int
    after: int
    lag: int
    """Time of the message between them."""


class Blocks:
    """The blocks of a placement with one direction.

    The blocks are the F of every stage, the I (or B) of every stage, and the W of every stage. A
    spanning stage has a W for each rank.

    Args:
        cost: costs in whole numbers or fractions; jitter is ignored.
        limits: memory limit of each rank. The unit is the activations of one micro-batch on a rank
            with 1 / ranks of the model. None: no limit.
        freed: share of an activation that I frees; W frees the rest.
        fused: whether backwards are fused: B in place of I and W.

    Raises:
        ScheduleError: a cost that is a float or does not fit the stages, or a placement with
            several directions.
    """

    def __init__(
        self,
        placement: Placement,
        cost: Cost,
        *,
        limits: Sequence[Fraction] | None = None,
        freed: Fraction = Fraction(0),
        fused: bool = False,
    ) -> None:
        if len(placement.table) > 1:
            raise ScheduleError(
                f"search: the placement has {len(placement.table)} directions; it must have one"
            )
        check_spanning(placement, cost)
        self.placement = placement
        self.cost, self._per_unit = in_ticks(placement, replace(cost, jitter=0.0))
        self._kinds = (Kind.F, Kind.B) if fused else (Kind.F, Kind.I, Kind.W)
        self._grain = freed.denominator
        self.all = tuple(self._made(int(freed * self._grain)))
        self.needs = tuple(self._needed())
        self.on = [
            [index for index, block in enumerate(self.all) if rank in block.ranks]
            for rank in range(placement.ranks)
        ]
        """The blocks of each rank."""
        self.room = None if limits is None else [self._units(limit) for limit in limits]
        """Memory limit of each rank, in the unit of :attr:`Block.amount`."""

    def _made(self, freed: int) -> Iterator[Block]:
        placement, table = self.placement, self.cost.table(self.placement.stages)
        amounts = {Kind.F: self._grain, Kind.B: -self._grain, Kind.I: -freed}
        amounts[Kind.W] = freed - self._grain
        for kind in self._kinds:
            for stage in range(placement.stages):
                holders = placement.holders(stage)
                time = table[kind][stage]
                if not self.cost.overlap:  # the sender waits for the end of each message
                    time += self._link(kind, stage)
                if not isinstance(time, int):
                    raise ScheduleError(
                        "search: a solver needs costs in whole numbers or fractions, not floats"
                    )
                for ranks in [(rank,) for rank in holders] if kind == Kind.W else [holders]:
                    yield Block(kind, stage, ranks, time, amounts[kind])

    def _link(self, kind: Kind, stage: int) -> int:
        """Return the time of the slowest message with an operation's output; 0 if it sends none."""
        other = stage + 1 if kind == Kind.F else stage - 1
        if kind == Kind.W or not 0 <= other < self.placement.stages:
            return 0
        pairs = self.placement.messages(stage, other)
        return max((int(self.cost.link(*pair)) for pair in pairs), default=0)

    def _needed(self) -> Iterator[Need]:
        forward, back = self.of(Kind.F), self.of(self._kinds[1])
        chain = [index for index, *_ in forward] + [index for index, *_ in reversed(back)]
        for before, after in pairwise(chain):
            block = self.all[before]
            yield Need(before, after, self._link(block.kind, block.stage) * self.cost.overlap)
        for stage, weights in enumerate(self.of(Kind.W)):
            for index in weights:
                yield Need(back[stage][0], index, 0)

    def of(self, kind: Kind) -> list[list[int]]:
        """Return the blocks of a kind, by stage: one, or a W for each rank of a spanning stage."""
        found: list[list[int]] = [[] for _ in range(self.placement.stages)]
        for index, block in enumerate(self.all):
            if block.kind == kind:
                found[block.stage].append(index)
        return [own for own in found if own]

    def _units(self, limit: Fraction) -> int:
        return floor(limit * self._grain / self.placement.stage_shares[0])

    def least(self, microbatches: int) -> int:
        """Return a makespan that no schedule can beat: a rank's work after its first input."""
        return max(
            min(self.earliest[index] for index in own)
            + microbatches * sum(self.all[index].duration for index in own)
            for own in self.on
        )

    def time(self, ticks: int) -> Time:
        """Convert a time of blocks to the unit of the costs."""
        return plain(Fraction(ticks, self._per_unit))

    @cached_property
    def kept(self) -> list[tuple[int, int]]:
        """The activations of a micro-batch as (F, block that frees all or a part of it)."""
        forward = self.of(Kind.F)
        return [
            (forward[block.stage][0], index)
            for index, block in enumerate(self.all)
            if block.amount < 0
        ]

    @cached_property
    def serial(self) -> int:
        """Time of one micro-batch if its blocks run one after the other."""
        return sum(block.duration for block in self.all) + sum(need.lag for need in self.needs)

    @cached_property
    def work(self) -> int:
        """Time that the busiest rank computes per micro-batch: no schedule has a shorter period."""
        return max(sum(self.all[index].duration for index in own) for own in self.on)

    @cached_property
    def earliest(self) -> list[int]:
        """Start of each block of a micro-batch that is alone in the pipeline."""
        starts = [0] * len(self.all)
        for before, after, lag in self.needs:  # in topological order
            starts[after] = max(starts[after], starts[before] + self.all[before].duration + lag)
        return starts

    @cached_property
    def one_by_one(self) -> list[int]:
        """Start of each block of a micro-batch whose blocks run one after the other."""
        starts = [0] * len(self.all)
        lags = {need.after: need.lag for need in self.needs}
        now = 0
        for index in self._topological:
            starts[index] = now + lags.get(index, 0)
            now = starts[index] + self.all[index].duration
        return starts

    def schedule(self, name: str, starts: Starts) -> Schedule:
        """Return the schedule in which each rank runs its operations in the order of `starts`."""
        topological = {index: place for place, index in enumerate(self._topological)}
        lists = []
        for own in self.on:
            order = sorted(
                (start, start + self.all[index].duration, topological[index], number, index)
                for index in own
                for number, start in enumerate(starts[index])
            )
            blocks = ((self.all[index], number) for *_, number, index in order)
            lists.append(packed(pack(block.kind, block.stage, number) for block, number in blocks))
        return Schedule(name, self.placement, len(starts[0]), tuple(lists))

    @cached_property
    def _topological(self) -> list[int]:
        return list(dict.fromkeys(index for need in self.needs for index in need[:2]))
