"""The form of a schedule: one packed array of operations per rank.

An operation is one signed 64-bit integer, so that a schedule of millions of them stays small
and fast in plain Python; :class:`Op` is the readable view, made on demand.

====== ============== ===========================================
bits   field          note
====== ============== ===========================================
0-3    kind           :class:`Kind`
4-19   stage          below 2**16
20-43  micro-batch    below 2**24
44-59  slice          below 2**16; part of a sequence
60     joined         runs as one with the next of the list
====== ============== ===========================================
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.placement import Placement

STAGE_SHIFT = 4
MICROBATCH_SHIFT = 20
SLICE_SHIFT = 44
JOINED = 1 << 60
KIND_MASK = (1 << STAGE_SHIFT) - 1
STAGE_MASK = (1 << (MICROBATCH_SHIFT - STAGE_SHIFT)) - 1
MICROBATCH_MASK = (1 << (SLICE_SHIFT - MICROBATCH_SHIFT)) - 1
SLICE_MASK = 0xFFFF


class Kind(IntEnum):
    """Kinds of operations."""

    F = 0
    """Forward."""
    B = 1
    """Backward, fused: input gradient and weight gradient in one."""
    I = 2  # noqa: E741
    """Input gradient."""
    W = 3
    """Weight gradient."""
    R = 4
    """Recomputation of the forward, ahead of the backward."""
    U = 5
    """Update of a stage's weights, in a schedule with :class:`Updates`. The field of the
    micro-batch has the window."""


_KINDS = tuple(Kind)
WORK = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
"""Kinds that work on a micro-batch, by their numbers."""


class Op(NamedTuple):
    """One operation on one micro-batch (or slice of it) at one virtual stage."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    joined: bool = False
    """This operation and the next of the list run as one: they start when the inputs of both are
    there, and their outputs are there when both have ended (OVERLAP_F_B of
    torch.distributed.pipelining; the fused pairs of DualPipe)."""

    def __str__(self) -> str:
        """The text of torch.distributed.pipelining, as in ``2F5``: stage, kind, micro-batch."""
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind.name}{self.microbatch}{part}"


def pack(kind: int, stage: int, microbatch: int, slice: int = 0, joined: bool = False) -> int:
    """The integer of an operation; ScheduleError where a number does not fit its field."""
    if not (
        0 <= kind <= KIND_MASK
        and 0 <= stage <= STAGE_MASK
        and 0 <= microbatch <= MICROBATCH_MASK
        and 0 <= slice <= SLICE_MASK
    ):
        raise ScheduleError(
            f"operation (kind {int(kind)}, stage {stage}, micro-batch {microbatch}, slice {slice}) "
            f"does not fit: stages and slices go up to {STAGE_MASK}, micro-batches up to "
            f"{MICROBATCH_MASK}"
        )
    code = kind | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | slice << SLICE_SHIFT
    return code | JOINED if joined else code


def unpack(code: int) -> Op:
    """The operation of an integer made by :func:`pack`; ScheduleError for an unknown kind."""
    kind = code & KIND_MASK
    if kind > Kind.U:
        raise ScheduleError(f"operation code {code}: kind {kind} is unknown; kinds are 0 to 5")
    return Op(
        _KINDS[kind],
        code >> STAGE_SHIFT & STAGE_MASK,
        code >> MICROBATCH_SHIFT & MICROBATCH_MASK,
        code >> SLICE_SHIFT & SLICE_MASK,
        code & JOINED > 0,
    )


def span(kind: Kind, stage: int, start: int, stop: int) -> range:
    """The codes of micro-batches start .. stop-1 of one kind at one stage."""
    base = pack(kind, stage, 0)
    return range(
        base + (start << MICROBATCH_SHIFT),
        base + (stop << MICROBATCH_SHIFT),
        1 << MICROBATCH_SHIFT,
    )


class Read(NamedTuple):
    """The weights that an operation reads."""

    version: int
    """Weights after so many updates of the stage."""
    ahead: Fraction = Fraction(0)
    """By how many updates they are predicted ahead; below 0: moved back."""

    def __str__(self) -> str:
        """``3``, or ``3+1`` predicted by one update."""
        if not self.ahead:
            return f"{self.version}"
        sign = "+" if self.ahead > 0 else ""
        return f"{self.version}{sign}{self.ahead}"


@dataclass(frozen=True)
class Updates:
    """Updates within a schedule: what makes operations read stale weights.

    Window t is micro-batches t * `window` onward; U(t) makes version t+1 of a stage out of version
    t, from the gradients of window t.
    """

    window: int
    """Micro-batches of an update."""
    reads: tuple[tuple[Read, ...], ...]
    """reads[rank][n]: what operation n of the rank reads; of a U the version that it makes."""
    waits: bool = False
    """An update needs the gradients of its window of all ranks (their norm, for clipping); else of
    its own stage alone."""
    follows: bool = True
    """Promise: the operations of a micro-batch at a stage read what its F has read."""
    kept: tuple[int, ...] | None = None
    """Promise: per rank, the most weights of a stage that are kept at once: versions, each from its
    update to its last reader and the newest always, and what is predicted for some readers."""


@dataclass(frozen=True)
class Schedule:
    """One list of operations for every pipeline rank, in order.

    Nothing but the sizes is checked here; :func:`megapipe.schedule.proof.validate.validate` proves
    that a schedule is complete and can be executed.
    """

    name: str
    placement: Placement
    microbatches: int
    ops: tuple["array[int]", ...]
    """One ``array('q')`` of packed operations per rank."""
    activation_bound: tuple[int, ...] | None = None
    """Promise of the generator: per rank, the most chunk activations alive at once, each counted
    from its F (or from its R, where the stage recomputes) to its W (or B); that of a slice or of a
    part of a micro-batch counts as one."""
    forward_only: bool = False
    """The schedule has an F for each stage and micro-batch and nothing else."""
    direction: tuple[int, ...] | None = None
    """The direction of the placement that each micro-batch runs through; default: 0 for all."""
    slices: int = 1
    """Number of slices of every sequence. The F of a slice needs that of the slice before it on the
    same stage (its keys and values); the I or B of a slice needs that of the slice after it."""
    sizes: tuple[Fraction, ...] | None = None
    """Share of a whole micro-batch's rows that each micro-batch holds; default: 1 for all."""
    recompute: frozenset[int] = frozenset()
    """Stages whose F keeps its input alone. The rest is computed again by an R, or, where a
    micro-batch has none, at the start of its I or B."""
    updates: Updates | None = None
    """Where weights are updated within the schedule; by default they are once it has ended."""

    def __post_init__(self) -> None:
        ranks = self.placement.ranks
        if not 1 <= self.microbatches <= MICROBATCH_MASK:
            raise ScheduleError(
                f"schedule {self.name}: microbatches must be from 1 to {MICROBATCH_MASK}, "
                f"not {self.microbatches}"
            )
        if not 1 <= self.slices <= SLICE_MASK:
            raise ScheduleError(
                f"schedule {self.name}: slices must be from 1 to {SLICE_MASK}, not {self.slices}"
            )
        for what, given, wanted, each in (
            ("lists of operations", self.ops, ranks, "rank"),
            ("limits", self.activation_bound, ranks, "rank"),
            ("directions", self.direction, self.microbatches, "micro-batch"),
            ("sizes", self.sizes, self.microbatches, "micro-batch"),
            ("lists of versions", self.updates.reads if self.updates else None, ranks, "rank"),
        ):
            if given is not None and len(given) != wanted:
                plural = "es" if each.endswith("ch") else "s"
                raise ScheduleError(
                    f"schedule {self.name}: {len(given)} {what} for {wanted} {each}{plural}; "
                    f"one per {each} is needed"
                )
        directions = len(self.placement.table)
        for microbatch, direction in enumerate(self.direction or ()):
            if not 0 <= direction < directions:
                raise ScheduleError(
                    f"schedule {self.name}: micro-batch {microbatch} runs through direction "
                    f"{direction}; directions go from 0 to {directions - 1}"
                )
        for microbatch, size in enumerate(self.sizes or ()):
            if not 0 < size <= 1:
                raise ScheduleError(
                    f"schedule {self.name}: micro-batch {microbatch} is {size} of a whole one; "
                    "sizes are above 0 and at most 1"
                )

    def direction_of(self, microbatch: int) -> int:
        """The direction that a micro-batch runs through."""
        return self.direction[microbatch] if self.direction else 0

    def size_of(self, microbatch: int) -> Fraction:
        """The share of a whole micro-batch's rows that a micro-batch holds."""
        return self.sizes[microbatch] if self.sizes else Fraction(1)

    @cached_property
    def numbers(self) -> Mapping[tuple[int, Fraction], int]:
        """How many micro-batches have each direction and size."""
        each = range(self.microbatches)
        return Counter(zip(map(self.direction_of, each), map(self.size_of, each), strict=True))

    @property
    def whole_microbatches(self) -> Fraction:
        """Micro-batches of a step in whole ones: `microbatches`, less where `sizes` are below 1."""
        return sum(self.sizes, start=Fraction(0)) if self.sizes else Fraction(self.microbatches)

    def rank_ops(self, rank: int) -> list[Op]:
        """The operations of a rank, readable."""
        return [unpack(code) for code in self.ops[rank]]


def packed(codes: Iterable[int]) -> "array[int]":
    """An array of packed operations."""
    return array("q", codes)
