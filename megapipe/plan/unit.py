"""Measured costs of a stage, or of some of its layers: bytes, kernels and collectives."""

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
"""Operations on a micro-batch if the backward is split into I and W."""
TWO_HOPS = ("ep in a node", "ep between nodes")
"""Axes of two-hop dispatch: ranks of one node, and ranks with the same index in their nodes."""


class Kernel(BaseModel):
    """One call of a kernel."""

    model_config = ConfigDict(frozen=True)

    name: str
    """torch's name of the operation."""
    flops: int
    read: int
    """Bytes of the kernel's inputs."""
    written: int
    """Bytes of the kernel's outputs."""
    dtype: str = "float32"
    """torch's name of the inputs' type, as in bfloat16."""
    product: tuple[int, int, int] | None = None
    """m, n and k of a matrix product [m, k] @ [k, n]; of attention, the number of queries and keys
    of a head, and the head's width."""
    batch: int = 1
    """Number of equal products, or of heads over all samples."""


class Transfer(BaseModel):
    """One collective, or one message to a peer, as a rank takes part in it."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """Kind of communication: all_reduce, all_gather, reduce_scatter, all_to_all or send."""
    axis: str
    """Name of the axis: tp; cp, or ulysses within cp; cp*tp for values of whole sequences; ep, or
    one of :data:`TWO_HOPS`."""
    members: int
    """Number of ranks in the group."""
    span: int
    """Number of ranks from the group's first rank to its last, both included; equal to `members` if
    the ranks are neighbours."""
    bytes: int
    """Bytes of the whole tensor; each member has a shard of it, or a term of its sum."""
    dtype: str
    """torch's name of the tensor's type; counts are int64."""

    @property
    def wire(self) -> Fraction:
        """Bytes that a member sends if the collective runs in a ring."""
        return on_the_wire(self.kind, self.bytes, self.members)


def on_the_wire(kind: str, size: int, members: int) -> Fraction:
    """Return the bytes that each of `members` ranks sends in a ring. `size`: bytes of the
    collective's whole tensor, or of the message."""
    if kind == "send":
        return Fraction(size)
    times = 2 if kind == "all_reduce" else 1
    return Fraction(times * size * (members - 1), members)


class Unit(BaseModel):
    """Costs of one micro-batch, or of one slice of it, at a stage on one rank."""

    model_config = ConfigDict(frozen=True)

    held: int
    """Bytes saved on the device from F to I; from R to I if the stage is recomputed as a whole."""
    host: int
    """Bytes saved in host memory from F to I."""
    queued: int
    """Bytes held on the device from I to W."""
    kept: int
    """Bytes held on the device from F to R, or to I if there is no R; equal to `held` unless the
    stage is recomputed as a whole."""
    gradient: int
    """Bytes of the gradient that I or B receives from the next stage."""
    cached: tuple[int, int] = (0, 0)
    """Bytes in the cache that a micro-batch's slices share: after F of this slice, and after I.
    They count in no other attribute."""
    peaks: Mapping[Operation, int]
    """Peak bytes on the device within each operation, with incoming and outgoing messages. If the
    stage is recomputed as a whole, R has an entry, and I and B follow an R."""
    operations: Mapping[Operation, tuple[Kernel | Transfer, ...]]
    """Kernels and collectives by operation, in order."""
    compiled: bool = False
    """Whether the run compiles its blocks (``kernels.compile``). They are measured uncompiled: a
    run takes at most the measured bytes, and has fewer kernels."""

    def peak(self, operation: Operation, *, rebuilt: bool = True) -> int:
        """Return the peak bytes on the device within an operation. Unless an R has `rebuilt` the
        stage, I and B also recompute the forward."""
        own = self.peaks[operation]
        if rebuilt or operation not in "IB" or "R" not in self.peaks:
            return own
        return max(own, self.peaks["R"] + self.gradient)

    def transfers(self, operation: Operation) -> list[Transfer]:
        """Return an operation's collectives; a B of compiled blocks has those of I and W."""
        runs: tuple[Operation, ...] = (operation,)
        if operation == "B" and self.compiled:
            runs = "I", "W"
        every = (each for run in runs for each in self.operations.get(run, ()))
        return [each for each in every if isinstance(each, Transfer)]

    def flops(self, operation: Operation) -> int:
        """Return the FLOPs of an operation."""
        every = self.operations.get(operation, ())
        return sum(each.flops for each in every if isinstance(each, Kernel))
