"""Schedules from building blocks (Qi et al., 2405.15362).

A *building block* gives the time slots of the operations of one micro-batch, or of one group of
micro-batches. Repeated every `period` slots, it is a schedule. The building block shows how much
memory the schedule needs: if an activation lives for l slots, at most ceil(l / period) such
activations are alive at once. Three functions make a schedule from a building block:

1. :func:`place_weight_grads` puts omitted weight gradients into free slots;
2. :func:`repeat` repeats the building block once per group. The schedule has an order but no times:
   an operation starts as early as its rank's order and its inputs allow. So the paper's step of
   squeezing idle slots out is not needed;
3. :func:`~megapipe.schedule.generators.reorder.reorder` moves operations into idle slots before and
   after the steady state, at the same peak memory.

An operation takes one time slot, a fused backward (B) two.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, product

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Schedule, packed, span
from megapipe.schedule.placement import Placement


@dataclass(frozen=True)
class BuildingBlock:
    """Time slots of the operations of one group of micro-batches.

    Raises:
        ScheduleError: an operation is missing, comes before its input, or shares a slot with
            another operation of its rank when the building block is repeated.
    """

    placement: Placement
    """A placement with one direction."""
    period: int
    """Number of time slots from one group of micro-batches to the next."""
    slots: Mapping[Op, int]
    """First time slot of every operation of micro-batches 0 .. group-1. Each stage has an F and
    either a B, or an I and a W; the W may be omitted."""

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
                        f"building block: {op} and {other} are both on rank {rank} in slot "
                        f"{used % self.period} of the period of {self.period}; "
                        "a rank has one operation per slot"
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
                raise ScheduleError(
                    f"building block: {missing.pop()} is missing; each stage needs it"
                )
            first = self.slots[before] + _length(before)
            if self.slots[op] < first:
                raise ScheduleError(
                    f"building block: {op} is in slot {self.slots[op]}; it needs {before}, so its "
                    f"earliest possible slot is {first}"
                )

    def _back(self, stage: int, microbatch: int) -> Op:
        fused = Op(Kind.B, stage, microbatch)
        return fused if fused in self.slots else Op(Kind.I, stage, microbatch)

    @property
    def group(self) -> int:
        """Number of micro-batches in one building block."""
        return 1 + max(op.microbatch for op in self.slots)

    @property
    def pending(self) -> list[Op]:
        """Weight gradients (W) without a slot yet, in the order of the slots of their I."""
        missing = {
            op._replace(kind=Kind.W): slot for op, slot in self.slots.items() if op.kind == Kind.I
        }
        return sorted(missing.keys() - self.slots.keys(), key=missing.__getitem__)


def _length(op: Op) -> int:
    """Return the number of time slots that an operation takes."""
    return 2 if op.kind == Kind.B else 1


def place_weight_grads(block: BuildingBlock) -> BuildingBlock:
    """Put every weight gradient (W) without a slot into the first free slot after its I.

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
                f"building block: rank {rank} has no free slot for {op} in a period of "
                f"{block.period}"
            )
    return BuildingBlock(block.placement, block.period, slots)


def peak(block: BuildingBlock) -> tuple[int, ...]:
    """Return, per rank, an upper bound of the chunk activations alive at once.

    The bound is the sum of ceil(lifespan / period) over the chunk activations of one group of
    micro-batches. It holds for any number of micro-batches, and building blocks are designed with
    it. A lifespan goes from the start of F to the end of W (or B).

    Raises:
        ScheduleError: the building block has no slots for its weight gradients yet.
    """
    totals = [0] * block.placement.ranks
    for rank, start, end in _lives(block):
        totals[rank] += -(-(end - start) // block.period)
    return tuple(totals)


def alive(block: BuildingBlock) -> tuple[int, ...]:
    """Return, per rank, the maximum number of chunk activations alive at once.

    It is reached in the steady state, after enough repetitions of the building block. It is at most
    :func:`peak`, which assumes that all lifespans overlap.

    Raises:
        ScheduleError: the building block has no slots for its weight gradients yet.
    """
    slots = [[0] * block.period for _ in range(block.placement.ranks)]
    for rank, start, end in _lives(block):
        for slot in range(start, end):
            slots[rank][slot % block.period] += 1
    return tuple(map(max, slots))


def _lives(block: BuildingBlock) -> Iterator[tuple[int, int, int]]:
    """Yield, for every activation, its rank, its first slot and the slot after its last one."""
    if block.pending:
        raise ScheduleError(
            f"building block: {block.pending[0]} has no slot yet; call place_weight_grads first"
        )
    for op, slot in block.slots.items():
        if op.kind in (Kind.B, Kind.W):
            rank = block.placement.rank_of(op.stage)
            yield rank, block.slots[op._replace(kind=Kind.F)], slot + _length(op)


def repeat(block: BuildingBlock, microbatches: int, name: str = "block") -> Schedule:
    """Repeat a building block once per group of micro-batches, one period apart.

    Any number of micro-batches is possible; the last group may be incomplete. Slots rise along the
    path of every micro-batch, so the schedule can always be executed, however long operations take.
    """
    cells: list[list[tuple[int, int]]] = [[] for _ in range(block.placement.ranks)]
    for op, slot in block.slots.items():
        codes = span(op.kind, op.stage, 0, microbatches)[op.microbatch :: block.group]
        cells[block.placement.rank_of(op.stage)].extend(
            zip(count(slot, block.period), codes, strict=False)
        )
    ops = tuple(packed(code for _, code in sorted(row)) for row in cells)
    return Schedule(name, block.placement, microbatches, ops)
