"""Data structure of a schedule: one packed array of operations per rank.

An operation is one signed 64-bit integer, so that a schedule of millions of them stays small and
fast in plain Python. The readable view, :class:`Op`, is made on demand.

====== ============== ===========================================
bits   field          note
====== ============== ===========================================
0-3    kind           :class:`Kind`
4-19   stage          below 2**16
20-43  micro-batch    below 2**24
44-59  slice          below 2**16; part of a sequence
60     joined         overlaps with the next
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
    """Fused backward: input gradient and weight gradient in one."""
    I = 2  # noqa: E741
    """Input gradient."""
    W = 3
    """Weight gradient."""
    R = 4
    """Recomputation of the forward, ahead of the backward."""
    U = 5
    """Weight update of a stage, in a no-flush schedule (:class:`Updates`). The micro-batch field
    holds the index of the update window."""


_KINDS = tuple(Kind)
WORK = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
"""Kinds that work on a micro-batch: all except U, in the order of their values."""


class Op(NamedTuple):
    """One operation on one micro-batch (or slice of it) at one virtual stage."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    joined: bool = False
    """Whether this operation and the next one of the list run overlapped, as a joined pair: they
    start when both have their inputs, and their outputs are ready when both have ended (OVERLAP_F_B
    of torch.distributed.pipelining; the fused pairs of DualPipe)."""

    def __str__(self) -> str:
        """Return the text of torch.distributed.pipelining: stage, kind, micro-batch (``2F5``)."""
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind.name}{self.microbatch}{part}"


def pack(kind: int, stage: int, microbatch: int, slice: int = 0, joined: bool = False) -> int:
    """Pack an operation into an integer. Raises ScheduleError if a number does not fit its
    field."""
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
    """Return the operation that :func:`pack` packed. Raises ScheduleError for an unknown kind."""
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
    """Return the packed operations of one kind at one stage on micro-batches start .. stop-1."""
    base = pack(kind, stage, 0)
    return range(
        base + (start << MICROBATCH_SHIFT),
        base + (stop << MICROBATCH_SHIFT),
        1 << MICROBATCH_SHIFT,
    )


class Read(NamedTuple):
    """The weights that an operation reads."""

    version: int
    """Number of updates of the stage that the weights contain."""
    ahead: Fraction = Fraction(0)
    """Number of updates by which the weights are extrapolated from `version`: above 0 they are
    predicted ahead, below 0 moved back."""

    def __str__(self) -> str:
        """Return the version, as in ``3``, or as in ``3+1`` if predicted by one update."""
        if not self.ahead:
            return f"{self.version}"
        sign = "+" if self.ahead > 0 else ""
        return f"{self.version}{sign}{self.ahead}"


@dataclass(frozen=True)
class Updates:
    """Weight updates of a no-flush schedule, whose operations read stale weights.

    Update window t is the micro-batches from t * `window` to (t+1) * `window` - 1. Operation U(t)
    of a stage makes weight version t+1 out of version t, with the gradients of update window t.
    """

    window: int
    """Number of micro-batches per update."""
    reads: tuple[tuple[Read, ...], ...]
    """Weights that operation n of a rank reads, or makes if it is a U, as reads[rank][n]."""
    waits: bool = False
    """Whether an update waits for the window's gradients on all pipeline ranks, as clipping by the
    global norm needs. Otherwise it waits only for the gradients of its own stage."""
    follows: bool = True
    """Whether all operations of a micro-batch at a stage read the same weights as its F."""
    kept: tuple[int, ...] | None = None
    """Maximum number of weight versions of one stage kept at once, per rank, as the generator
    promises. Older and predicted versions are kept until their last reader."""


@dataclass(frozen=True)
class Schedule:
    """One list of operations for every pipeline rank, in order.

    The constructor checks only lengths and ranges. :func:`.proof.validate.validate` proves that the
    schedule is complete and can be executed.
    """

    name: str
    placement: Placement
    microbatches: int
    ops: tuple["array[int]", ...]
    """One ``array('q')`` of packed operations per rank."""
    activation_bound: tuple[int, ...] | None = None
    """Maximum number of activations alive at once, per rank, as the generator promises. Each stage
    and work item (micro-batch or slice, whatever its size) has one activation. It lives from the F,
    or from the recomputation if the stage recomputes, to the W or B."""
    forward_only: bool = False
    """Whether the schedule has no backward: only one F per stage and micro-batch."""
    direction: tuple[int, ...] | None = None
    """Direction (:class:`.Placement`) in which each micro-batch runs through the ranks, as an
    index; default: 0 for all."""
    slices: int = 1
    """Number of slices of every sequence. The F of a slice needs the F of the previous slice on the
    same stage (keys and values); the I or B of a slice needs the I or B of the next slice."""
    sizes: tuple[Fraction, ...] | None = None
    """Size of each micro-batch as a fraction of a whole one, for schedules that split
    micro-batches; default: 1 for all."""
    recompute: frozenset[int] = frozenset()
    """Stages whose F saves only its input. The activations are recomputed by an R or, for a
    micro-batch without R, at the beginning of its I or B."""
    updates: Updates | None = None
    """Weight updates within the schedule; None: weights are updated after the schedule ends."""

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
            ("activation bounds", self.activation_bound, ranks, "rank"),
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
        if self.placement.spanning:
            self._check_spanning()
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

    def _check_spanning(self) -> None:
        for present, what in (
            (self.slices > 1, "slices"),
            (self.sizes, "micro-batches of unequal size"),
            (self.recompute, "recomputation"),
            (self.updates, "updates within the schedule"),
            (any(max(ops, default=0) >= JOINED for ops in self.ops), "joined operations"),
        ):
            if present:
                raise ScheduleError(
                    f"schedule {self.name}: stage {min(self.placement.spanning)} spans all ranks; "
                    f"{what} cannot be combined with that"
                )

    def direction_of(self, microbatch: int) -> int:
        """Return the index of the direction in which a micro-batch runs through the ranks."""
        return self.direction[microbatch] if self.direction else 0

    def size_of(self, microbatch: int) -> Fraction:
        """Return the size of a micro-batch as a fraction of a whole one."""
        return self.sizes[microbatch] if self.sizes else Fraction(1)

    @cached_property
    def numbers(self) -> Mapping[tuple[int, Fraction], int]:
        """Number of micro-batches by direction and size."""
        each = range(self.microbatches)
        return Counter(zip(map(self.direction_of, each), map(self.size_of, each), strict=True))

    @property
    def whole_microbatches(self) -> Fraction:
        """Number of whole micro-batches: the sum of all sizes, as fractions of a whole one."""
        return sum(self.sizes, start=Fraction(0)) if self.sizes else Fraction(self.microbatches)

    def rank_ops(self, rank: int) -> list[Op]:
        """Return the operations of a rank in readable form."""
        return [unpack(code) for code in self.ops[rank]]


def packed(codes: Iterable[int]) -> "array[int]":
    """Return an array of packed operations."""
    return array("q", codes)
