"""What operations wait for and what they make, as tables that a loop over millions can use.

A *node* is a stage as one kind of micro-batch sees it: a lane (replica and size) and a stage. A
*unit* is a slice of a micro-batch. A *token* is an operation with its node for its stage and its
unit for its micro-batch::

    bits 0-3 kind   4-19 node   20-59 unit   60 joined

so with one lane and one slice the tokens are the operations themselves. The lower 20 bits, the
*low* part, select from a table what all operations of one kind at one node have in common. Slots
number what operations make: one row of units per node for forwards, one for input gradients, then
one that is always there (the first stage's input, the last stage's gradient) and one for what
nobody waits for.
"""

from array import array
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import (
    JOINED,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    SLICE_MASK,
    SLICE_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    Kind,
    Op,
    Schedule,
)

UNIT_SHIFT = MICROBATCH_SHIFT
LOW = (1 << UNIT_SHIFT) - 1
UNITS = (1 << 60 - UNIT_SHIFT) - 1


class Lane(NamedTuple):
    """A kind of micro-batch: the replica it runs through and its share of a whole one."""

    replica: int
    size: Fraction


class Edge(NamedTuple):
    """Where what one kind of operation needs comes from, or where what it makes goes to."""

    src: int
    dst: int


class Edges:
    """The tables of one schedule. Operations must be in range (see validate)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages = schedule.placement.stages
        self.units = schedule.microbatches * schedule.slices
        lanes: dict[Lane, int] = {}
        self.lane_of = [
            lanes.setdefault(Lane(schedule.replica_of(m), schedule.size_of(m)), len(lanes))
            for m in (range(schedule.microbatches) if schedule.replica or schedule.sizes else [0])
        ]
        self.lanes = tuple(lanes)
        self.nodes = len(lanes) * self.stages
        if self.nodes > STAGE_MASK:
            raise ScheduleError(
                f"schedule {schedule.name}: {self.stages} stages for {len(lanes)} kinds of "
                f"micro-batches (by replica and size) make {self.nodes} nodes; at most "
                f"{STAGE_MASK} are possible"
            )
        self.always = 2 * self.nodes * self.units
        self.nothing = self.always + self.units
        self.slots = self.nothing + self.units

    @property
    def plain(self) -> bool:
        """Tokens are the operations themselves."""
        return len(self.lanes) == 1 and self.schedule.slices == 1

    def tokens(self, rank: int) -> "array[int]":
        """The tokens of a rank's list."""
        ops = self.schedule.ops[rank]
        if self.plain:
            return ops
        codes = np.array(ops, np.int64)
        microbatch = codes >> MICROBATCH_SHIFT & MICROBATCH_MASK
        unit = microbatch * self.schedule.slices + (codes >> SLICE_SHIFT & SLICE_MASK)
        tokens = codes & (LOW | JOINED) | unit << UNIT_SHIFT
        if len(self.lanes) > 1:
            tokens += np.array(self.lane_of)[microbatch] * self.stages << STAGE_SHIFT
        return array("q", tokens.tobytes())

    def op(self, token: int) -> Op:
        """The operation of a token."""
        microbatch, part = divmod(token >> UNIT_SHIFT & UNITS, self.schedule.slices)
        stage = (token >> STAGE_SHIFT & STAGE_MASK) % self.stages
        return Op(Kind(token & KIND_MASK), stage, microbatch, part, token & JOINED > 0)

    def by_low(self) -> Iterator[tuple[int, Kind, Lane, int]]:
        """Every low part with its kind, lane and stage."""
        for index, lane in enumerate(self.lanes):
            for stage in range(self.stages):
                for kind in Kind:
                    yield kind | (index * self.stages + stage) << STAGE_SHIFT, kind, lane, stage

    def rank_of(self, lane: Lane, stage: int) -> int:
        """Where a node lives."""
        return self.schedule.placement.table[lane.replica][stage]

    @cached_property
    def base(self) -> tuple[list[int], list[int]]:
        """By low part: the slots, less the unit, that an operation needs and that it makes."""
        need: list[int] = []
        make: list[int] = []
        for low, kind, _, stage in self.by_low():
            node = low >> STAGE_SHIFT
            while len(need) <= low:
                need.append(self.always)
                make.append(self.nothing)
            if kind == Kind.F:
                make[low] = node * self.units
                if stage:
                    need[low] = (node - 1) * self.units
            elif kind in (Kind.I, Kind.B):
                make[low] = (self.nodes + node) * self.units
                if stage < self.stages - 1:
                    need[low] = (self.nodes + node + 1) * self.units
        return need, make

    def needed(self, token: int) -> int:
        """The slot that an operation needs."""
        return self.base[0][token & LOW] + (token >> UNIT_SHIFT & UNITS)

    @cached_property
    def incoming(self) -> list[Edge | None]:
        """By low part: the ranks between which its input is sent; None if it is not."""
        return self._crossing(back=False)

    @cached_property
    def outgoing(self) -> list[Edge | None]:
        """By low part: the ranks between which its output is sent; None if it is not."""
        return self._crossing(back=True)

    def _crossing(self, *, back: bool) -> list[Edge | None]:
        edges: list[Edge | None] = []
        for low, kind, lane, stage in self.by_low():
            edges.extend([None] * (low + 1 - len(edges)))
            if kind in (Kind.W, Kind.R):
                continue
            other = stage + (1 if (kind == Kind.F) == back else -1)
            if not 0 <= other < self.stages:
                continue
            mine, peer = self.rank_of(lane, stage), self.rank_of(lane, other)
            if mine != peer:
                edges[low] = Edge(mine, peer) if back else Edge(peer, mine)
        return edges

    def maker(self, slot: int) -> tuple[int, tuple[Op, ...]]:
        """The rank that fills a slot, and the operations that could."""
        row, unit = divmod(slot, self.units)
        table, node = divmod(row, self.nodes)
        lane, stage = divmod(node, self.stages)
        microbatch, part = divmod(unit, self.schedule.slices)
        kinds = (Kind.I, Kind.B) if table else (Kind.F,)
        rank = self.rank_of(self.lanes[lane], stage)
        return rank, tuple(Op(kind, stage, microbatch, part) for kind in kinds)
