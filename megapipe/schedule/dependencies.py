"""Inputs and outputs of operations, as tables that a loop over millions can use.

Micro-batches of equal direction and size share a *flow*; a *node* is one stage in one flow. A
*piece* is a slice of a micro-batch. A *code* is an operation with its node for its stage and its
piece for its micro-batch::

    bits 0-3 kind   4-19 node   20-59 piece   60 joined

so with one flow and one slice the codes are the operations themselves. The lower 20 bits, the
*low* part, select from a table what all operations of one kind at one node have in common. Slots
number what operations make: one row of pieces per node for forwards, one for input gradients, then
one that is always there (the first stage's input, the last stage's gradient), one for what nobody
waits for and one for the totals of windows: an update needs the last gradients of its window, which
no single operation makes (:meth:`Dependencies.gradients_of`).
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

PIECE_SHIFT = MICROBATCH_SHIFT
LOW = (1 << PIECE_SHIFT) - 1
PIECES = (1 << 60 - PIECE_SHIFT) - 1


class MicroBatchKind(NamedTuple):
    """A kind of micro-batch: the direction it runs through and its share of a whole one."""

    direction: int
    size: Fraction


class RankPair(NamedTuple):
    """The two ranks between which operations of one kind at one node send or receive."""

    src: int
    dst: int


class Dependencies:
    """The tables of one schedule. Operations must be in range (see validate)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages = schedule.placement.stages
        self.pieces = schedule.microbatches * schedule.slices
        flows: dict[MicroBatchKind, int] = {}
        self.flow_of = [
            flows.setdefault(
                MicroBatchKind(schedule.direction_of(m), schedule.size_of(m)), len(flows)
            )
            for m in (range(schedule.microbatches) if schedule.direction or schedule.sizes else [0])
        ]
        self.flows = tuple(flows)
        self.nodes = len(flows) * self.stages
        if self.nodes > STAGE_MASK:
            raise ScheduleError(
                f"schedule {schedule.name}: {self.stages} stages for {len(flows)} kinds of "
                f"micro-batches (by direction and size) make {self.nodes} nodes; at most "
                f"{STAGE_MASK} are possible"
            )
        self.always = 2 * self.nodes * self.pieces
        self.nothing = self.always + self.pieces
        self.totals = self.nothing + self.pieces
        self.slots = self.totals + self.pieces

    @property
    def always_ready(self) -> range:
        """The slots of what is always there."""
        return range(self.always, self.nothing)

    @property
    def plain(self) -> bool:
        """Whether codes are the operations themselves: one flow, one slice."""
        return len(self.flows) == 1 and self.schedule.slices == 1

    def codes(self, rank: int) -> "array[int]":
        """The codes of a rank's list."""
        ops = self.schedule.ops[rank]
        if self.plain:
            return ops
        packed = np.array(ops, np.int64)
        microbatch = packed >> MICROBATCH_SHIFT & MICROBATCH_MASK
        piece = microbatch * self.schedule.slices + (packed >> SLICE_SHIFT & SLICE_MASK)
        codes = packed & (LOW | JOINED) | piece << PIECE_SHIFT
        if len(self.flows) > 1:
            codes += np.array(self.flow_of)[microbatch] * self.stages << STAGE_SHIFT
        return array("q", codes.tobytes())

    def op(self, code: int) -> Op:
        """The operation of a code."""
        microbatch, part = divmod(code >> PIECE_SHIFT & PIECES, self.schedule.slices)
        stage = (code >> STAGE_SHIFT & STAGE_MASK) % self.stages
        return Op(Kind(code & KIND_MASK), stage, microbatch, part, code & JOINED > 0)

    def by_low(self) -> Iterator[tuple[int, Kind, MicroBatchKind, int]]:
        """Every low part with its kind, flow and stage."""
        for index, flow in enumerate(self.flows):
            for stage in range(self.stages):
                for kind in Kind:
                    yield kind | (index * self.stages + stage) << STAGE_SHIFT, kind, flow, stage

    def rank_of(self, flow: MicroBatchKind, stage: int) -> int:
        """The rank that has a node."""
        return self.schedule.placement.table[flow.direction][stage]

    @cached_property
    def base(self) -> tuple[list[int], list[int]]:
        """By low part: the slot for piece 0 that an operation needs, and the one that it makes."""
        need: list[int] = []
        make: list[int] = []
        for low, kind, _, stage in self.by_low():
            node = low >> STAGE_SHIFT
            while len(need) <= low:
                need.append(self.always)
                make.append(self.nothing)
            if kind == Kind.F:
                make[low] = node * self.pieces
                if stage:
                    need[low] = (node - 1) * self.pieces
            elif kind in (Kind.I, Kind.B):
                make[low] = (self.nodes + node) * self.pieces
                if stage < self.stages - 1:
                    need[low] = (self.nodes + node + 1) * self.pieces
            elif kind == Kind.U:
                need[low] = self.totals
        return need, make

    def gradients_of(self, update: int) -> list[int]:
        """The slots of the gradients that an update waits for, by its code: the last one of its
        window of each stage at which it has to wait, on each rank that has the stage."""
        stage = (update >> STAGE_SHIFT & STAGE_MASK) % self.stages
        return self._last_gradients[update >> PIECE_SHIFT & PIECES][stage]

    @cached_property
    def _last_gradients(self) -> list[list[list[int]]]:
        """By window and stage."""
        updates = self.schedule.updates
        assert updates is not None
        count = self.schedule.microbatches // updates.window
        found: list[dict[tuple[int, int], int]] = [{} for _ in range(count)]
        make = self.base[1]
        for rank, codes in enumerate(map(self.codes, range(self.schedule.placement.ranks))):
            for code in codes:
                if code & KIND_MASK in (Kind.B, Kind.I):
                    piece = code >> PIECE_SHIFT & PIECES
                    window = piece // self.schedule.slices // updates.window
                    stage = (code >> STAGE_SHIFT & STAGE_MASK) % self.stages
                    found[window][stage, rank] = make[code & LOW] + piece
        return [
            [
                sorted({slot for (at, _), slot in own.items() if updates.waits or at == stage})
                for stage in range(self.stages)
            ]
            for own in found
        ]

    def needed(self, code: int) -> int:
        """The slot that an operation needs."""
        return self.base[0][code & LOW] + (code >> PIECE_SHIFT & PIECES)

    @cached_property
    def incoming(self) -> list[RankPair | None]:
        """By low part: the ranks between which an operation's input is sent; None if it is not."""
        return self._crossing(back=False)

    @cached_property
    def outgoing(self) -> list[RankPair | None]:
        """By low part: the ranks between which an operation's output is sent; None if it is not."""
        return self._crossing(back=True)

    def _crossing(self, *, back: bool) -> list[RankPair | None]:
        edges: list[RankPair | None] = []
        for low, kind, flow, stage in self.by_low():
            edges.extend([None] * (low + 1 - len(edges)))
            if kind in (Kind.W, Kind.R, Kind.U):
                continue
            other = stage + (1 if (kind == Kind.F) == back else -1)
            if not 0 <= other < self.stages:
                continue
            mine, peer = self.rank_of(flow, stage), self.rank_of(flow, other)
            if mine != peer:
                edges[low] = RankPair(mine, peer) if back else RankPair(peer, mine)
        return edges

    def maker(self, slot: int) -> tuple[int, tuple[Op, ...]]:
        """The rank that fills a slot, and the operations that could."""
        row, piece = divmod(slot, self.pieces)
        table, node = divmod(row, self.nodes)
        flow, stage = divmod(node, self.stages)
        microbatch, part = divmod(piece, self.schedule.slices)
        kinds = (Kind.I, Kind.B) if table else (Kind.F,)
        rank = self.rank_of(self.flows[flow], stage)
        return rank, tuple(Op(kind, stage, microbatch, part) for kind in kinds)
