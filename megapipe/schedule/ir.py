"""The form of a schedule: one packed array of operations per rank, and its text.

An operation is one signed 64-bit integer, so that a schedule of millions of them stays small
and fast in plain Python; :class:`Op` is the readable view, made on demand.

====== ============== ===========================================
bits   field          note
====== ============== ===========================================
0-3    kind           :class:`Kind`
4-19   stage          below 2**16
20-43  micro-batch    below 2**24
44-59  slice          below 2**16; part of a sequence
60-62  (free)         for flags such as "runs as one with the next"
====== ============== ===========================================
"""

import csv
import io
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.placement import Placement

STAGE_SHIFT = 4
MICROBATCH_SHIFT = 20
SLICE_SHIFT = 44
KIND_MASK = (1 << STAGE_SHIFT) - 1
STAGE_MASK = (1 << (MICROBATCH_SHIFT - STAGE_SHIFT)) - 1
MICROBATCH_MASK = (1 << (SLICE_SHIFT - MICROBATCH_SHIFT)) - 1
SLICE_MASK = 0xFFFF

_CELL = re.compile(r"(\d+)([FBIWR])(\d+)(?:\.(\d+))?")


class Kind(IntEnum):
    """What an operation computes."""

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


class Op(NamedTuple):
    """One operation on one micro-batch (or slice of it) at one virtual stage."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        """The text of torch.distributed.pipelining, as in ``2F5``: stage, kind, micro-batch."""
        part = f".{self.slice}" if self.slice else ""
        return f"{self.stage}{self.kind.name}{self.microbatch}{part}"


def pack(kind: int, stage: int, microbatch: int, slice: int = 0) -> int:
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
    return kind | stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | slice << SLICE_SHIFT


def unpack(code: int) -> Op:
    """The operation of an integer made by :func:`pack`; ScheduleError for an unknown kind."""
    kind = code & KIND_MASK
    if kind > Kind.R:
        raise ScheduleError(f"operation code {code}: kind {kind} is unknown; kinds are 0 to 4")
    return Op(
        Kind(kind),
        code >> STAGE_SHIFT & STAGE_MASK,
        code >> MICROBATCH_SHIFT & MICROBATCH_MASK,
        code >> SLICE_SHIFT & SLICE_MASK,
    )


def span(kind: Kind, stage: int, start: int, stop: int) -> range:
    """The codes of micro-batches start .. stop-1 of one kind at one stage."""
    base = pack(kind, stage, 0)
    return range(
        base + (start << MICROBATCH_SHIFT),
        base + (stop << MICROBATCH_SHIFT),
        1 << MICROBATCH_SHIFT,
    )


@dataclass(frozen=True)
class Schedule:
    """What every pipeline rank computes, in order.

    Nothing but the sizes is checked here; :func:`megapipe.schedule.validate.validate` proves
    that a schedule is complete and can be executed.
    """

    name: str
    placement: Placement
    microbatches: int
    ops: tuple["array[int]", ...]
    """One ``array('q')`` of packed operations per rank."""
    held_limit: tuple[int, ...] | None = None
    """Promise of the generator: per rank, the most chunk activations alive at once, each counted
    from its F to its W (or B)."""
    forward_only: bool = False
    """The schedule has an F for each stage and micro-batch and nothing else."""

    def __post_init__(self) -> None:
        ranks = self.placement.ranks
        if not 1 <= self.microbatches <= MICROBATCH_MASK:
            raise ScheduleError(
                f"schedule {self.name}: microbatches must be from 1 to {MICROBATCH_MASK}, "
                f"not {self.microbatches}"
            )
        for what, given in (("lists of operations", self.ops), ("limits", self.held_limit)):
            if given is not None and len(given) != ranks:
                raise ScheduleError(
                    f"schedule {self.name}: {len(given)} {what} for {ranks} ranks; "
                    "one per rank is needed"
                )

    def rank_ops(self, rank: int) -> list[Op]:
        """The operations of a rank, readable."""
        return [unpack(code) for code in self.ops[rank]]

    def to_csv(self) -> str:
        """Compute-only CSV of torch.distributed.pipelining: one row per rank, cells like 0F0."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([str(op) for op in self.rank_ops(rank)] for rank in range(len(self.ops)))
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str, *, name: str = "csv", forward_only: bool = False) -> "Schedule":
        """Read what :meth:`to_csv` or torch.distributed.pipelining writes (compute-only).

        The placement and the number of micro-batches are those of the cells; empty cells (idle
        slots) are skipped.

        Raises:
            ScheduleError: an unreadable cell, a stage on two ranks, a stage that is missing.
        """
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
        home: dict[int, int] = {}
        lists = []
        for rank, row in enumerate(rows):
            ops = [
                _parse(cell.strip(), f"schedule {name}: row {rank + 1}, cell {column + 1}")
                for column, cell in enumerate(row)
                if cell.strip()
            ]
            for op in ops:
                if home.setdefault(op.stage, rank) != rank:
                    raise ScheduleError(
                        f"schedule {name}: {op} is in row {rank + 1} but stage {op.stage} began "
                        f"in row {home[op.stage] + 1}; a stage lives on one rank"
                    )
            lists.append(ops)
        if not home or max(home) >= len(home):
            missing = next(stage for stage in range(len(home) + 1) if stage not in home)
            raise ScheduleError(f"schedule {name}: stage {missing} has no operation")
        table = tuple(home[stage] for stage in range(len(home)))
        return cls(
            name=name,
            placement=Placement(len(rows), (table,)),
            microbatches=1 + max(op.microbatch for ops in lists for op in ops),
            ops=tuple(packed(pack(*op) for op in ops) for ops in lists),
            forward_only=forward_only,
        )


def packed(codes: Iterable[int]) -> "array[int]":
    """An array of packed operations."""
    return array("q", codes)


def _parse(cell: str, where: str) -> Op:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{where}: {cell!r} is not an operation; write stage, kind (F, B, I, W) and "
            "micro-batch, as in 2F5"
        )
    stage, kind, microbatch, part = match.groups()
    return Op(Kind[kind], int(stage), int(microbatch), int(part or 0))
