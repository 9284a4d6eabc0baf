"""The first half of the proof that a schedule can be executed: each rank's list alone.

Every operation is of a stage that is on the rank for the micro-batch's direction; every (stage,
micro-batch, slice) has one F and one B, or one F, one I and one W, in that order; slices go forward
in order and backward in reverse; an R is between F and I (or B), at a stage that recomputes. All
checks compare places in a list, so millions of operations are read as arrays.
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
"""Operations that are read at once, so that arrays stay in the processor's cache."""
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class ListFacts:
    """Properties of the lists of all ranks, each by itself."""

    seen: NDArray[np.uint8]
    """By node and piece (see Dependencies), the kinds of its operations as a sum of BIT."""
    peaks: tuple[int, ...]
    """Per rank, the most chunk activations alive at once."""
    ascending: bool
    """At each stage input gradients and weight gradients are in the order of micro-batches, and
    slices of one in descending order."""


def read(dependencies: Dependencies) -> ListFacts:
    """Check every rank's list alone.

    Raises:
        ScheduleError: the first operation that cannot be where it is, and why.
    """
    lists = dependencies.schedule.ops
    first = np.full((len(WORK), dependencies.nodes * dependencies.pieces), _NEVER, np.int32)
    peaks: list[int] = []
    ascending = True
    for ranks in _batches(list(map(len, lists))):
        batch = _Batch(dependencies, ranks, first)
        batch.check()
        peaks.extend(batch.peaks())
        ascending = ascending and batch.ascending()
    seen = np.zeros(dependencies.nodes * dependencies.pieces, np.uint8)
    for kind in WORK:
        seen |= np.where(first[kind] < _NEVER, np.uint8(BIT[kind]), np.uint8(0))
    return ListFacts(seen, tuple(peaks), ascending)


def _batches(lengths: Sequence[int]) -> Iterator[range]:
    """Neighbouring ranks with so many operations as are read at once, or one rank."""
    begin = taken = 0
    for rank, length in enumerate(lengths):
        if taken and taken + length > AT_ONCE:
            yield range(begin, rank)
            begin, taken = rank, 0
        taken += length
    yield range(begin, len(lengths))


class _Batch:
    """The lists of some ranks, laid end to end; all arrays have an element for each operation.

    `first` has, by kind, node and piece, the place of the first such operation, and is filled in.
    """

    def __init__(self, dependencies: Dependencies, ranks: range, first: Ints) -> None:
        schedule = dependencies.schedule
        self._dependencies, self._ranks, self._first = dependencies, ranks, first
        lists = [np.array(schedule.ops[rank], np.int64) for rank in ranks]
        self._codes = codes = np.concatenate(lists)
        self._bounds = np.cumsum([0, *map(len, lists)])
        self._rank: Ints = np.repeat(ranks, [len(each) for each in lists])
        self._place = np.arange(len(codes))
        self._kind = codes & KIND_MASK
        self._of = [self._kind == kind for kind in Kind]
        self._stage = codes >> STAGE_SHIFT & STAGE_MASK
        self._microbatch = codes >> MICROBATCH_SHIFT & MICROBATCH_MASK
        self._slice = (codes & ~JOINED) >> SLICE_SHIFT
        self._misplaced = self._find_misplaced()
        flows = np.array(dependencies.flow_of)[self._microbatch * (len(dependencies.flow_of) > 1)]
        piece = self._microbatch * schedule.slices + self._slice
        node = flows * dependencies.stages + self._stage
        self._slot = np.where(self._misplaced, 0, node * dependencies.pieces + piece)
        for kind in WORK:
            here = np.flatnonzero(self._of[kind] & ~self._misplaced)[::-1]
            first[kind][self._slot[here]] = here  # of equal slots the last one stays
        self._earlier = [first[kind][self._slot] < self._place for kind in WORK]
        """By kind: whether there was one for the same stage, micro-batch and slice before."""
        self._late = self._recomputes()
        self._adds, self._held = self._count()

    def _find_misplaced(self) -> Bools:
        """Operations that no order could make right. Numbers that are out of range become 0, so
        that all can select from tables."""
        schedule = self._dependencies.schedule
        wrong = (self._codes < 0) | (self._codes >= 2 * JOINED) | (self._kind > Kind.U)
        for numbers, count in (
            (self._stage, schedule.placement.stages),
            (self._microbatch, schedule.microbatches),
            (self._slice, schedule.slices),
        ):
            wrong |= numbers >= count
            numbers[wrong] = 0
        homes = np.array(schedule.placement.table)
        direction = np.array(schedule.direction or [0])
        row = direction[self._microbatch * (schedule.direction is not None)]
        at_home = homes[row, self._stage] == self._rank
        holds = (homes[:, self._stage] == self._rank).any(axis=0)
        wrong |= ~np.where(self._is(Kind.U), holds, at_home)
        if schedule.updates is None:
            wrong |= self._is(Kind.U)
        if schedule.forward_only:
            wrong |= self._kind != Kind.F
        return wrong | self._is(Kind.R) & ~self._recomputes()

    def _recomputes(self) -> Bools:
        """Whether the stage keeps the input of an F alone."""
        recompute = np.zeros(self._dependencies.stages, np.bool_)
        recompute[list(self._dependencies.schedule.recompute)] = True
        return recompute[self._stage]

    def _is(self, *kinds: Kind) -> Bools:
        found = np.zeros(len(self._codes), np.bool_)
        for kind in kinds:
            found |= self._of[kind]
        return found

    def _count(self) -> tuple[Bools, Ints]:
        """Operations that make an activation, and how many the rank holds while they run."""
        if self._dependencies.schedule.forward_only:
            return self._is(), np.zeros_like(self._place)
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
        places = [int(each.argmax()) if each.any() else len(each) for each in wrong]
        at = min(places)
        if at < len(self._codes):
            raise self._error(places.index(at), at)

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
        """Duplicates, and what comes before an operation that it needs on its own rank."""
        f, b, i, w, r = self._earlier
        begun = b | i | w
        return (
            self._is(Kind.F) & (f | r | begun)
            | self._is(Kind.R) & (~f | r | begun)
            | self._is(Kind.I, Kind.B) & (~f | begun)
            | self._is(Kind.W) & (~f | ~i | b | w)
        )

    def _slice_out_of_order(self) -> Bools:
        """An F before that of the slice before, or an I or B before that of the slice after."""
        slices = self._dependencies.schedule.slices
        if slices == 1:
            return self._is()
        forward = self._is(Kind.F) & (self._slice > 0)
        back = self._is(Kind.I, Kind.B) & (self._slice < slices - 1)
        before = self._first[Kind.F][self._slot - forward] < self._place
        after = self._first[[Kind.I, Kind.B]].min(axis=0)[self._slot + back] < self._place
        return forward & ~before | back & ~after

    def _badly_joined(self) -> Bools:
        """Joined with nothing, with what is joined again, or with the same micro-batch."""
        joined = self._codes >= JOINED
        if not joined.any():
            return joined
        last = np.isin(self._place, self._bounds[1:] - 1)
        same = self._microbatch == np.roll(self._microbatch, -1)
        return joined & (last | np.roll(joined, -1) | same)

    def peaks(self) -> list[int]:
        """Per rank, the most activations alive at once."""
        bounds = self._bounds.tolist()
        return [int(self._held[begin:end].max(initial=0)) for begin, end in pairwise(bounds)]

    def ascending(self) -> bool:
        """Whether both kinds of gradients are summed in the usual order at each stage."""
        slices = self._dependencies.schedule.slices
        order = self._microbatch * slices - self._slice
        stage = self._rank * self._dependencies.stages + self._stage
        for mask in (self._is(Kind.I, Kind.B), self._is(Kind.W, Kind.B)):
            by_stage = np.argsort(stage[mask], kind="stable")
            places, stages = order[mask][by_stage], stage[mask][by_stage]
            if ((np.diff(places) < 0) & (np.diff(stages) == 0)).any():
                return False
        return True
