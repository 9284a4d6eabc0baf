"""First part of the proof that a schedule can be executed: checks of each rank's list alone.

Every operation's stage is on the rank for the micro-batch's direction. Every (stage, micro-batch,
slice) has one F and one B, or one F, one I and one W, in that order. Slices go forward in order and
backward in reverse. An R is between F and I (or B), at a stage that recomputes. All checks compare
indices in a list, so millions of operations are checked as arrays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megapipe.errors import ScheduleError
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.ir import (
    JOINED,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    SLICE_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    WORK,
    Kind,
)
from megapipe.schedule.proof.violations import (
    BIT,
    badly_joined,
    misplaced,
    out_of_order,
    over,
    slice_out_of_order,
)

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]

AT_ONCE = 1 << 18
"""Maximum number of operations in an array, so that it stays in the processor's cache."""
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class ListFacts:
    """Properties of the ranks' lists, each found without the lists of other ranks."""

    seen: NDArray[np.uint8]
    """Sum of the BITs of the kinds found for each item and node, where a spanning stage has a node
    for each rank (:meth:`.Dependencies.nodes_of`)."""
    peaks: tuple[int, ...]
    """Maximum number of activations alive at once per rank (:attr:`Schedule.activation_bound`)."""
    ascending: bool
    """Whether input gradients and weight gradients at each stage are in the order of micro-batches,
    and slices of a micro-batch in descending order."""


def read(dependencies: Dependencies) -> ListFacts:
    """Check every rank's list alone.

    Raises:
        ScheduleError: the message names the first operation that cannot be where it is, and why.
    """
    lists = dependencies.schedule.ops
    first = np.full(
        (len(WORK), dependencies.list_nodes * dependencies.work_items), _NEVER, np.int32
    )
    peaks: list[int] = []
    ascending = True
    for ranks in _batches(list(map(len, lists))):
        batch = _Batch(dependencies, ranks, first)
        batch.check()
        peaks.extend(batch.peaks())
        ascending = ascending and batch.ascending()
    seen = np.zeros(dependencies.list_nodes * dependencies.work_items, np.uint8)
    for kind in WORK:
        seen |= np.where(first[kind] < _NEVER, np.uint8(BIT[kind]), np.uint8(0))
    return ListFacts(seen, tuple(peaks), ascending)


def _batches(lengths: Sequence[int]) -> Iterator[range]:
    """Yield ranges of consecutive ranks that have at most AT_ONCE operations together; a rank with
    more operations is a range by itself."""
    begin = taken = 0
    for rank, length in enumerate(lengths):
        if taken and taken + length > AT_ONCE:
            yield range(begin, rank)
            begin, taken = rank, 0
        taken += length
    yield range(begin, len(lengths))


class _Batch:
    """The lists of some ranks, concatenated; all arrays have an element for each operation.

    The constructor writes into `first` [kind, (node, item)] the index of the first such operation.
    """

    def __init__(self, dependencies: Dependencies, ranks: range, first: Ints) -> None:
        schedule = dependencies.schedule
        self._dependencies, self._ranks, self._first = dependencies, ranks, first
        lists = [np.array(schedule.ops[rank], np.int64) for rank in ranks]
        self._codes = codes = np.concatenate(lists)
        self._bounds = np.cumsum([0, *map(len, lists)])
        self._rank: Ints = np.repeat(ranks, [len(each) for each in lists])
        self._index = np.arange(len(codes))
        self._kind = codes & KIND_MASK
        self._of = [self._kind == kind for kind in Kind]
        self._stage = codes >> STAGE_SHIFT & STAGE_MASK
        self._microbatch = codes >> MICROBATCH_SHIFT & MICROBATCH_MASK
        self._slice = (codes & ~JOINED) >> SLICE_SHIFT
        self._misplaced = self._find_misplaced()
        flows = np.array(dependencies.flow_of)[self._microbatch * (len(dependencies.flow_of) > 1)]
        item = self._microbatch * schedule.slices + self._slice
        node = flows * dependencies.stages + self._stage
        if schedule.placement.spanning:
            for own, stage, rank in dependencies.nodes_of(0):
                node[(self._stage == stage) & (self._rank == rank)] = own
        self._node_item = np.where(self._misplaced, 0, node * dependencies.work_items + item)
        for kind in WORK:
            here = np.flatnonzero(self._of[kind] & ~self._misplaced)[::-1]
            first[kind][self._node_item[here]] = here  # of equal ones the last one stays
        self._earlier = [first[kind][self._node_item] < self._index for kind in WORK]
        """Whether an operation of a kind comes earlier for the same stage, micro-batch, slice."""
        self._late = self._recomputes()
        self._adds, self._held = self._count()

    def _find_misplaced(self) -> Bools:
        """Find operations that are wrong wherever they are in the list, such as those at a stage of
        another rank. Set stages, micro-batches and slices out of range to 0, to index tables."""
        schedule = self._dependencies.schedule
        wrong = (self._codes < 0) | (self._codes >= 2 * JOINED) | (self._kind > Kind.U)
        for numbers, count in (
            (self._stage, schedule.placement.stages),
            (self._microbatch, schedule.microbatches),
            (self._slice, schedule.slices),
        ):
            wrong |= numbers >= count
            numbers[wrong] = 0
        rank_of = np.array(schedule.placement.table)
        direction = np.array(schedule.direction or [0])
        row = direction[self._microbatch * (schedule.direction is not None)]
        on_rank = rank_of[row, self._stage] == self._rank
        holds = (rank_of[:, self._stage] == self._rank).any(axis=0)
        if schedule.placement.spanning:
            on_rank |= np.isin(self._stage, list(schedule.placement.spanning))
        wrong |= ~np.where(self._is(Kind.U), holds, on_rank)
        if schedule.updates is None:
            wrong |= self._is(Kind.U)
        if schedule.forward_only:
            wrong |= self._kind != Kind.F
        return wrong | self._is(Kind.R) & ~self._recomputes()

    def _recomputes(self) -> Bools:
        """Return for each operation whether its stage recomputes."""
        recompute = np.zeros(self._dependencies.stages, np.bool_)
        recompute[list(self._dependencies.schedule.recompute)] = True
        return recompute[self._stage]

    def _is(self, *kinds: Kind) -> Bools:
        found = np.zeros(len(self._codes), np.bool_)
        for kind in kinds:
            found |= self._of[kind]
        return found

    def _count(self) -> tuple[Bools, Ints]:
        """Return which operations create an activation, and how many the rank holds during each."""
        if self._dependencies.schedule.forward_only:
            return self._is(), np.zeros_like(self._index)
        begins_late = self._is(Kind.I, Kind.B) & self._late & ~self._earlier[Kind.R]
        adds = self._is(Kind.R) | self._is(Kind.F) & ~self._late | begins_late
        frees = self._is(Kind.B, Kind.W)
        alive = np.cumsum(adds) - np.cumsum(frees) + frees
        before = np.append(0, np.cumsum(adds.astype(int) - frees))[self._bounds[:-1]]
        return adds, alive - np.repeat(before, np.diff(self._bounds))

    def check(self) -> None:
        """Raise the first error of these lists."""
        schedule = self._dependencies.schedule
        limits = np.array(schedule.activation_bound or [_NEVER] * len(schedule.ops))
        wrong = (
            self._misplaced,
            self._badly_joined(),
            self._out_of_order(),
            self._slice_out_of_order(),
            self._adds & (self._held > limits[self._rank]),
        )
        firsts = [int(each.argmax()) if each.any() else len(each) for each in wrong]
        at = min(firsts)
        if at < len(self._codes):
            raise self._error(firsts.index(at), at)

    def _error(self, which: int, at: int) -> ScheduleError:
        schedule, rank = self._dependencies.schedule, int(self._rank[at])
        index = at - int(self._bounds[rank - self._ranks.start])
        if which == 0:
            return misplaced(schedule, rank, index)
        if which == 1:
            return badly_joined(schedule, rank, index)
        if which == 2:
            seen = sum(BIT[kind] for kind in WORK if self._earlier[kind][at])
            return out_of_order(schedule, rank, index, seen)
        if which == 3:
            return slice_out_of_order(self._dependencies, rank, index)
        assert schedule.activation_bound is not None
        return over(schedule, rank, index, int(self._held[at]), schedule.activation_bound[rank])

    def _out_of_order(self) -> Bools:
        """Find duplicates, and operations that come before one that they need on their rank."""
        f, b, i, w, r = self._earlier
        begun = b | i | w
        return (
            self._is(Kind.F) & (f | r | begun)
            | self._is(Kind.R) & (~f | r | begun)
            | self._is(Kind.I, Kind.B) & (~f | begun)
            | self._is(Kind.W) & (~f | ~i | b | w)
        )

    def _slice_out_of_order(self) -> Bools:
        """Find each F that comes before the F of the previous slice, and each I or B that comes
        before the I or B of the next slice."""
        slices = self._dependencies.schedule.slices
        if slices == 1:
            return self._is()
        forward = self._is(Kind.F) & (self._slice > 0)
        back = self._is(Kind.I, Kind.B) & (self._slice < slices - 1)
        before = self._first[Kind.F][self._node_item - forward] < self._index
        after = self._first[[Kind.I, Kind.B]].min(axis=0)[self._node_item + back] < self._index
        return forward & ~before | back & ~after

    def _badly_joined(self) -> Bools:
        """Find joined operations that are the last of their list, or whose next operation is joined
        too or of the same micro-batch."""
        joined = self._codes >= JOINED
        if not joined.any():
            return joined
        last = np.isin(self._index, self._bounds[1:] - 1)
        same = self._microbatch == np.roll(self._microbatch, -1)
        return joined & (last | np.roll(joined, -1) | same)

    def peaks(self) -> list[int]:
        """Return the maximum number of activations alive at once, per rank."""
        bounds = self._bounds.tolist()
        return [int(self._held[begin:end].max(initial=0)) for begin, end in pairwise(bounds)]

    def ascending(self) -> bool:
        """Whether input and weight gradients run in micro-batch order at each stage
        (:attr:`ListFacts.ascending`)."""
        slices = self._dependencies.schedule.slices
        order = self._microbatch * slices - self._slice
        stage = self._rank * self._dependencies.stages + self._stage
        for mask in (self._is(Kind.I, Kind.B), self._is(Kind.W, Kind.B)):
            by_stage = np.argsort(stage[mask], kind="stable")
            positions, stages = order[mask][by_stage], stage[mask][by_stage]
            if ((np.diff(positions) < 0) & (np.diff(stages) == 0)).any():
                return False
        return True
