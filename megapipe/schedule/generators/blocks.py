"""Schedules from building blocks (Qi et al., 2405.15362).

A *block* says in which slots the operations of one micro-batch run, or of one group of them.
Repeated every `period` slots, it is a schedule, and what the schedule needs can be read from the
block: of an activation that lives for l slots, at most ceil(l / period) are alive at once. To make
a schedule means to choose a block, and then

1. :func:`drop_weights` puts weight gradients that were left out into free slots;
2. :func:`repeat` lays the block down once per group. Lists have no times: an operation starts as
   early as the order of its rank and its inputs let it, so the result is *squeezed* already;
3. :func:`~megapipe.schedule.generators.reorder.reorder` shortens what the repetition left open
   before and after the steady state, at the same peak.

Operations take one slot, the fused backward two.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, product

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Schedule, packed, span
from megapipe.schedule.placement import Placement


@dataclass(frozen=True)
class BuildingBlock:
    """Slots of the operations of one group of micro-batches.

    Raises:
        ScheduleError: an operation is missing, comes before its input, or shares a slot with
            another one when the block is repeated.
    """

    placement: Placement
    """With one direction."""
    period: int
    """In slots."""
    slots: Mapping[Op, int]
    """First slot of every operation of micro-batches 0 .. group-1: per stage an F, and a B or an I
    and a W. W may be left out."""

    def __post_init__(self) -> None:
        for microbatch, stage in product(range(self.group), range(self.placement.stages)):
            self._check_inputs(stage, microbatch)
        taken: dict[tuple[int, int], Op] = {}
        for op, slot in self.slots.items():
            rank = self.placement.rank_of(op.stage)
            for used in range(slot, slot + _length(op)):
                other = taken.setdefault((rank, used % self.period), op)
                if other is not op:
                    raise ScheduleError(
                        f"block: {op} and {other} meet on rank {rank} in slot "
                        f"{used % self.period} of the period of {self.period}; "
                        "operations of a rank need slots of their own"
                    )

    def _check_inputs(self, stage: int, microbatch: int) -> None:
        forward, back = Op(Kind.F, stage, microbatch), self._back(stage, microbatch)
        edges = [(forward, back)]
        if stage:
            edges.append((Op(Kind.F, stage - 1, microbatch), forward))
        if stage < self.placement.stages - 1:
            edges.append((self._back(stage + 1, microbatch), back))
        weight = Op(Kind.W, stage, microbatch)
        if weight in self.slots:
            edges.append((back, weight))
        for before, op in edges:
            missing = {before, op} - self.slots.keys()
            if missing:
                raise ScheduleError(f"block: {missing.pop()} is missing; each stage needs it")
            first = self.slots[before] + _length(before)
            if self.slots[op] < first:
                raise ScheduleError(
                    f"block: {op} is in slot {self.slots[op]}; it needs {before}, so its first "
                    f"slot is {first}"
                )

    def _back(self, stage: int, microbatch: int) -> Op:
        fused = Op(Kind.B, stage, microbatch)
        return fused if fused in self.slots else Op(Kind.I, stage, microbatch)

    @property
    def group(self) -> int:
        """Micro-batches of one block."""
        return 1 + max(op.microbatch for op in self.slots)

    @property
    def pending(self) -> list[Op]:
        """The weight gradients that were left out, in the order of their inputs."""
        missing = {
            op._replace(kind=Kind.W): slot for op, slot in self.slots.items() if op.kind == Kind.I
        }
        return sorted(missing.keys() - self.slots.keys(), key=missing.__getitem__)


def _length(op: Op) -> int:
    """Slots that an operation takes."""
    return 2 if op.kind == Kind.B else 1


def drop_weights(block: BuildingBlock) -> BuildingBlock:
    """The block with every W that it left out in the first free slot after its I.

    Raises:
        ScheduleError: a rank has no free slot left.
    """
    slots = dict(block.slots)
    taken = {
        (block.placement.rank_of(op.stage), used % block.period)
        for op, slot in slots.items()
        for used in range(slot, slot + _length(op))
    }
    for op in block.pending:
        rank = block.placement.rank_of(op.stage)
        after = slots[op._replace(kind=Kind.I)] + 1
        for slot in range(after, after + block.period):
            if (rank, slot % block.period) not in taken:
                slots[op] = slot
                taken.add((rank, slot % block.period))
                break
        else:
            raise ScheduleError(
                f"block: rank {rank} has no free slot for {op} in a period of {block.period}"
            )
    return BuildingBlock(block.placement, block.period, slots)


def peak(block: BuildingBlock) -> tuple[int, ...]:
    """Per rank, the sum of ceil(lifespan / period) over its activations, one per chunk and
    micro-batch of the group.

    No repetition of the block holds more chunk activations at once, whatever the number of
    micro-batches: this is the rule by which blocks are designed. Lifespans go from the start of F
    to the end of W (or B).

    Raises:
        ScheduleError: the block has no slots for its weight gradients yet.
    """
    totals = [0] * block.placement.ranks
    for rank, start, end in _lives(block):
        totals[rank] += -(-(end - start) // block.period)
    return tuple(totals)


def alive(block: BuildingBlock) -> tuple[int, ...]:
    """Per rank, the chunk activations alive at once in the busiest slot of the steady state.

    This is what enough repetitions hold; at most :func:`peak`, as lives need not overlap.

    Raises:
        ScheduleError: the block has no slots for its weight gradients yet.
    """
    slots = [[0] * block.period for _ in range(block.placement.ranks)]
    for rank, start, end in _lives(block):
        for slot in range(start, end):
            slots[rank][slot % block.period] += 1
    return tuple(map(max, slots))


def _lives(block: BuildingBlock) -> Iterator[tuple[int, int, int]]:
    """Rank, first slot and end of every activation."""
    if block.pending:
        raise ScheduleError(f"block: {block.pending[0]} has no slot yet; use drop_weights first")
    for op, slot in block.slots.items():
        if op.kind in (Kind.B, Kind.W):
            rank = block.placement.rank_of(op.stage)
            yield rank, block.slots[op._replace(kind=Kind.F)], slot + _length(op)


def repeat(block: BuildingBlock, microbatches: int, name: str = "block") -> Schedule:
    """One block per group of micro-batches, each a period after the one before; any number.

    Operations that the last group lacks are left out. As slots rise along the way of every
    micro-batch, the lists can always be executed, whatever the operations take.
    """
    cells: list[list[tuple[int, int]]] = [[] for _ in range(block.placement.ranks)]
    for op, slot in block.slots.items():
        codes = span(op.kind, op.stage, 0, microbatches)[op.microbatch :: block.group]
        cells[block.placement.rank_of(op.stage)].extend(
            zip(count(slot, block.period), codes, strict=False)
        )
    ops = tuple(packed(code for _, code in sorted(row)) for row in cells)
    return Schedule(name, block.placement, microbatches, ops)
