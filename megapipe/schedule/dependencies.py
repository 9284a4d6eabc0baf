"""Inputs and results of operations, as tables for loops over millions of operations.

Micro-batches of equal direction and size share a *flow*; a *node* is one stage in one flow. An
*item* is the number of a work item (a micro-batch or one slice of it). A *code* is a packed
operation with its node in place of its stage and its item in place of micro-batch and slice::

    bits 0-3 kind   4-19 node   20-59 item   60 joined

With one flow and one slice, codes equal the packed operations of the schedule. The low 20 bits of a
code (kind and node) index tables of what all operations of one kind at one node have in common. A
*result number*, below `Dependencies.slots`, stands for the output of an operation. Each node has a
row of result numbers, by item, for its forwards and one for its input gradients. Three more rows
follow: for results that always exist (inputs of operations that need no other stage), for outputs
that nothing waits for, and for operations that need several results
(:meth:`Dependencies.inputs_of`). These are updates, which need the last gradients of their update
window, and the F, B and I of a spanning stage (:attr:`.Placement.spanning`), which begin when all
ranks have come to them. For the latter one more table follows: the *arrival* of each rank at each
such operation.
"""

from array import array
from collections.abc import Iterator
from fractions import Fraction
from functools import cached_property
from itertools import product
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

WORK_ITEM_SHIFT = MICROBATCH_SHIFT
LOW = (1 << WORK_ITEM_SHIFT) - 1
WORK_ITEM_MASK = (1 << 60 - WORK_ITEM_SHIFT) - 1


class MicroBatchKind(NamedTuple):
    """Direction of a flow's micro-batches, and their size as a fraction of a whole micro-batch."""

    direction: int
    size: Fraction


class RankPair(NamedTuple):
    """Source and destination rank of a message."""

    src: int
    dst: int


class Dependencies:
    """Tables of the inputs and results of one schedule's operations. Stages, micro-batches and
    slices must be in range (:func:`~megapipe.schedule.proof.validate.validate` checks that)."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.stages = schedule.placement.stages
        self.work_items = schedule.microbatches * schedule.slices
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
        self.always = 2 * self.nodes * self.work_items
        self.nothing = self.always + self.work_items
        self.totals = self.nothing + self.work_items
        self.arrivals = self.totals + self.work_items
        spanning = schedule.placement.spanning
        kinds = (Kind.F, Kind.B, Kind.I) if spanning else ()
        self.together = {
            kind | stage << STAGE_SHIFT: index
            for index, (kind, stage) in enumerate(product(kinds, sorted(spanning)))
        }
        """Operations that all ranks run at once: low bits of their codes, numbered from 0."""
        meetings = len(self.together) * self.work_items
        self.slots = self.arrivals + meetings * schedule.placement.ranks

    @property
    def always_ready(self) -> range:
        """Numbers of results that always exist: inputs of operations that need no other stage."""
        return range(self.always, self.nothing)

    @property
    def plain(self) -> bool:
        """Whether codes equal packed operations: the schedule has one flow and one slice."""
        return len(self.flows) == 1 and self.schedule.slices == 1

    def codes(self, rank: int) -> "array[int]":
        """Return the operations of a rank's list as codes, with node and item (see the module)."""
        ops = self.schedule.ops[rank]
        if self.plain:
            return ops
        packed = np.array(ops, np.int64)
        microbatch = packed >> MICROBATCH_SHIFT & MICROBATCH_MASK
        item = microbatch * self.schedule.slices + (packed >> SLICE_SHIFT & SLICE_MASK)
        codes = packed & (LOW | JOINED) | item << WORK_ITEM_SHIFT
        if len(self.flows) > 1:
            codes += np.array(self.flow_of)[microbatch] * self.stages << STAGE_SHIFT
        return array("q", codes.tobytes())

    def op(self, code: int) -> Op:
        """Return the operation that a code stands for."""
        microbatch, part = divmod(code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK, self.schedule.slices)
        stage = (code >> STAGE_SHIFT & STAGE_MASK) % self.stages
        return Op(Kind(code & KIND_MASK), stage, microbatch, part, code & JOINED > 0)

    def by_low(self) -> Iterator[tuple[int, Kind, MicroBatchKind, int]]:
        """Yield (low bits of a code, kind, flow, stage) for each kind of operation and node."""
        for index, flow in enumerate(self.flows):
            for stage in range(self.stages):
                for kind in Kind:
                    yield kind | (index * self.stages + stage) << STAGE_SHIFT, kind, flow, stage

    @property
    def list_nodes(self) -> int:
        """Number of nodes if a spanning stage counts once for each rank (:meth:`nodes_of`)."""
        placement = self.schedule.placement
        return self.nodes + len(placement.spanning) * (placement.ranks - 1)

    def nodes_of(self, flow: int) -> Iterator[tuple[int, int, int]]:
        """Yield (node, stage, rank) for each list in which a flow's operations of a stage are.

        In the lists of ranks above 0, a spanning stage has nodes of its own behind all others.
        """
        placement = self.schedule.placement
        for stage in range(self.stages):
            yield flow * self.stages + stage, stage, self.rank_of(self.flows[flow], stage)
        own = self.nodes
        for stage in sorted(placement.spanning):
            for rank in range(1, placement.ranks):
                yield own, stage, rank
                own += 1

    def rank_of(self, flow: MicroBatchKind, stage: int) -> int:
        """Return the rank that holds a stage in the direction of a flow."""
        return self.schedule.placement.table[flow.direction][stage]

    @cached_property
    def base(self) -> tuple[list[int], list[int]]:
        """Two tables by low bits of a code: the number of the result that the operation on item 0
        needs, and of the result that it makes. For item n, add n. Where an operation needs several
        results, the first table has `totals`."""
        need, make = (list(row) for row in self._chain)
        for low in self.together:
            need[low] = self.totals
        return need, make

    @cached_property
    def _chain(self) -> tuple[list[int], list[int]]:
        """The tables `base`, with the neighbouring stage's result for spanning stages too."""
        need: list[int] = []
        make: list[int] = []
        for low, kind, _, stage in self.by_low():
            node = low >> STAGE_SHIFT
            while len(need) <= low:
                need.append(self.always)
                make.append(self.nothing)
            if kind == Kind.F:
                make[low] = node * self.work_items
                if stage:
                    need[low] = (node - 1) * self.work_items
            elif kind in (Kind.I, Kind.B):
                make[low] = (self.nodes + node) * self.work_items
                if stage < self.stages - 1:
                    need[low] = (self.nodes + node + 1) * self.work_items
            elif kind == Kind.U:
                need[low] = self.totals
        return need, make

    def arrival(self, code: int, rank: int) -> int:
        """Return the number of a rank's arrival at an operation that all ranks run at once."""
        item = code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
        meeting = self.together[code & LOW] * self.work_items + item
        return self.arrivals + meeting * self.schedule.placement.ranks + rank

    def inputs_of(self, code: int) -> list[int]:
        """Return the numbers of the results that an operation waits for if it needs several: an
        update, or an operation that all ranks run at once."""
        if code & LOW not in self.together:
            return self._gradients_of(code)
        first = self.arrival(code, 0)
        return [self.chained(code), *range(first, first + self.schedule.placement.ranks)]

    def _gradients_of(self, update: int) -> list[int]:
        """Return the numbers of the results that the update with code `update` waits for: on each
        holder of its stage, the last input gradient of its window. With `Updates.waits` it waits
        for these gradients of all stages."""
        stage = (update >> STAGE_SHIFT & STAGE_MASK) % self.stages
        return self._last_gradients[update >> WORK_ITEM_SHIFT & WORK_ITEM_MASK][stage]

    @cached_property
    def _last_gradients(self) -> list[list[list[int]]]:
        """Results of :meth:`_gradients_of` by update window and stage."""
        updates = self.schedule.updates
        assert updates is not None
        count = self.schedule.microbatches // updates.window
        found: list[dict[tuple[int, int], int]] = [{} for _ in range(count)]
        make = self.base[1]
        for rank, codes in enumerate(map(self.codes, range(self.schedule.placement.ranks))):
            for code in codes:
                if code & KIND_MASK in (Kind.B, Kind.I):
                    item = code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
                    window = item // self.schedule.slices // updates.window
                    stage = (code >> STAGE_SHIFT & STAGE_MASK) % self.stages
                    found[window][stage, rank] = make[code & LOW] + item
        return [
            [
                sorted({made for (at, _), made in own.items() if updates.waits or at == stage})
                for stage in range(self.stages)
            ]
            for own in found
        ]

    def needed(self, code: int) -> int:
        """Return the number of the result that the operation with this code needs."""
        return self.base[0][code & LOW] + (code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK)

    def chained(self, code: int) -> int:
        """Return the number of the neighbouring stage's result that an operation needs; other than
        :meth:`needed` for operations that all ranks run at once."""
        return self._chain[0][code & LOW] + (code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK)

    @cached_property
    def incoming(self) -> list[RankPair | None]:
        """Sender and receiver of an operation's input, by low bits of code; None: no message. Of an
        input that all ranks receive, it is the first pair."""
        return self._crossing(back=False)

    @cached_property
    def outgoing(self) -> list[RankPair | None]:
        """Sender and receiver of an operation's output, by low bits of code; None: no message."""
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
            source, target = (stage, other) if back else (other, stage)
            pairs = self.schedule.placement.messages(source, target, flow.direction)
            if pairs:
                edges[low] = RankPair(*pairs[0])
        return edges

    def maker(self, result: int) -> tuple[int, tuple[Op, ...]]:
        """Return the rank that makes a result, and the operations that can: F, or I and B. A rank's
        arrival is made by the operation at which it arrives."""
        if result >= self.arrivals:
            meeting, rank = divmod(result - self.arrivals, self.schedule.placement.ranks)
            which, item = divmod(meeting, self.work_items)
            low = next(low for low, index in self.together.items() if index == which)
            return rank, (self.op(low | item << WORK_ITEM_SHIFT),)
        row, item = divmod(result, self.work_items)
        table, node = divmod(row, self.nodes)
        flow, stage = divmod(node, self.stages)
        microbatch, part = divmod(item, self.schedule.slices)
        kinds = (Kind.I, Kind.B) if table else (Kind.F,)
        rank = self.rank_of(self.flows[flow], stage)
        return rank, tuple(Op(kind, stage, microbatch, part) for kind in kinds)
