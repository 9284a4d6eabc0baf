"""A stage, or a part of it, as a run has measured it: bytes, kernels and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megapipe.schedule.ir import Kind

Operation = Literal["F", "R", "I", "W", "B"]
OPERATIONS: Mapping[Kind, Operation] = {
    Kind.F: "F",
    Kind.R: "R",
    Kind.I: "I",
    Kind.W: "W",
    Kind.B: "B",
}
SPLIT: tuple[Operation, ...] = ("F", "I", "W")
"""Operations of a forward and a backward in two."""
TWO_HOPS = ("ep in a node", "ep between nodes")
"""Axes of the ranks of a node that share ep, and of those that have one place in each node."""


class Kernel(BaseModel):
    """One call of a kernel."""

    model_config = ConfigDict(frozen=True)

    name: str
    """torch's name of the operation."""
    flops: int
    read: int
    """Bytes of its inputs."""
    written: int
    """Bytes of its outputs."""
    product: tuple[int, int, int] | None = None
    """m, n and k of a matrix product [m, k] @ [k, n]."""


class Transfer(BaseModel):
    """One collective, or one message to a peer."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send."""
    axis: str
    """tp or cp, or ulysses within cp; cp*tp for what is known of whole sequences; ep, or one of
    :data:`TWO_HOPS`."""
    members: int
    """Ranks of the group."""
    span: int
    """Ranks from the first member to the last one, both included: as many as the members where
    these are neighbours."""
    bytes: int
    """Size of the whole tensor, of which each member has a part or a term."""
    dtype: str
    """torch's name of its type; counts are int64."""

    @property
    def wire(self) -> Fraction:
        """Bytes that a member sends under a ring."""
        return on_the_wire(self.kind, self.bytes, self.members)


def on_the_wire(kind: str, size: int, members: int) -> Fraction:
    """Return the bytes of a collective's whole tensor, or of a message, that each of its `members`
    sends under a ring."""
    if kind == "send":
        return Fraction(size)
    times = 2 if kind == "all_reduce" else 1
    return Fraction(times * size * (members - 1), members)


class Unit(BaseModel):
    """Costs of one micro-batch, or of a slice of it, at a stage on one rank."""

    model_config = ConfigDict(frozen=True)

    held: int
    """Bytes on the device from F to I (from R to I where the stage is recomputed as a whole)."""
    host: int
    """Bytes in host memory from F to I."""
    queued: int
    """Bytes on the device from I to W."""
    kept: int
    """Bytes on the device from F to R, or to I without an R; `held` but where the stage is
    recomputed as a whole."""
    gradient: int
    """Bytes of the gradient that I or B receives."""
    cached: tuple[int, int] = (0, 0)
    """Bytes on the device that a micro-batch's slices share, which no other figure counts: after
    the F and after the I of this slice."""
    peaks: Mapping[Operation, int]
    """The most bytes on the device within each operation, incoming and outgoing messages included.
    R is there where the stage is recomputed as a whole; then I and B are those after it."""
    operations: Mapping[Operation, tuple[Kernel | Transfer, ...]]
    """Kernels and collectives of each operation, in their order."""
    compiled: bool = False
    """Whether the run compiles its blocks (``kernels.compile``). It is measured without that, so it
    takes these bytes or less, and fewer kernels."""

    def peak(self, operation: Operation, *, rebuilt: bool = True) -> int:
        """Return the most bytes on the device within an operation; unless `rebuilt`, I and B run
        the forward again themselves, which an R has done otherwise."""
        own = self.peaks[operation]
        if rebuilt or operation not in "IB" or "R" not in self.peaks:
            return own
        return max(own, self.peaks["R"] + self.gradient)

    def transfers(self, operation: Operation) -> list[Transfer]:
        """Collectives of an operation. A B of compiled blocks is an I and a W."""
        runs: tuple[Operation, ...] = (operation,)
        if operation == "B" and self.compiled:
            runs = "I", "W"
        every = (each for run in runs for each in self.operations.get(run, ()))
        return [each for each in every if isinstance(each, Transfer)]

    def flops(self, operation: Operation) -> int:
        """FLOPs of an operation."""
        every = self.operations.get(operation, ())
        return sum(each.flops for each in every if isinstance(each, Kernel))
