"""Boxing: turning the pieces of a value from one placement into another, with its traffic.

Pieces are a list of tensors, one per device, in the order of :attr:`Mesh.devices`. A conversion is
a sequence of steps, each along one mesh axis; :func:`route` finds the one that sends fewest bytes.
Bytes are those that all devices of a ring send together. For a value of T bytes on n devices
these are (n-1)T for all-gather and reduce-scatter, 2(n-1)T for all-reduce and (n-1)/n T for
all-to-all (OneFlow, 2110.15032, table 2). A slice and zeros elsewhere send nothing.
"""

from __future__ import annotations

from functools import cache
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from examples.sharding.placement import (
    BROADCAST,
    PARTIAL,
    Placement,
    Placements,
    Shape,
    divides,
    local_shape,
    split,
)

ITEM = 8
"""Bytes of an fp64 number."""


class Step(NamedTuple):
    """A conversion along one mesh axis."""

    axis: int
    source: Placement
    to: Placement
    kind: str
    """Name of the collective; slice and zeros are local."""
    bytes: int
    """Bytes sent by all devices."""

    @property
    def sends(self) -> bool:
        """Whether it is a collective."""
        return self.kind not in ("slice", "zeros")


_KINDS = {
    ("S", "B"): "all-gather",
    ("S", "S"): "all-to-all",
    ("S", "P"): "zeros",
    ("B", "S"): "slice",
    ("B", "P"): "zeros",
    ("P", "B"): "all-reduce",
    ("P", "S"): "reduce-scatter",
}


def _step(shape: Shape, at: Placements, axis: int, to: Placement, sizes: tuple[int, ...]) -> Step:
    kind = _KINDS[at[axis].kind, to.kind]
    count = sizes[axis]
    others = (*at[:axis], BROADCAST, *at[axis + 1 :])
    whole = ITEM * prod(local_shape(shape, others, sizes))
    groups = prod(sizes) // count
    sent = {
        "all-gather": (count - 1) * whole,
        "reduce-scatter": (count - 1) * whole,
        "all-reduce": 2 * (count - 1) * whole,
        "all-to-all": (count - 1) * whole // count,
    }
    return Step(axis, at[axis], to, kind, groups * sent.get(kind, 0))


def _in_order(at: Placements, axis: int) -> bool:
    """Whether no later axis splits the dimension that `axis` splits. Only then are the parts of
    the devices along `axis` neighbours in the value."""
    return at[axis].kind != "S" or at[axis] not in at[axis + 1 :]


@cache
def route(
    shape: Shape, source: Placements, to: Placements, sizes: tuple[int, ...]
) -> tuple[Step, ...]:
    """Return the steps from one placement to another that send fewest bytes (Dijkstra)."""
    queue: list[tuple[int, int, int, Placements, tuple[Step, ...]]] = [(0, 0, 0, source, ())]
    done: set[Placements] = set()
    pushed = 0
    while queue:
        sent, _, _, at, steps = heappop(queue)
        if at == to:
            return steps
        if at in done:
            continue
        done.add(at)
        for axis in range(len(sizes)):
            for place in (BROADCAST, PARTIAL, *map(split, range(len(shape)))):
                after = (*at[:axis], place, *at[axis + 1 :])
                if after in done or place == at[axis] or not divides(shape, after, sizes):
                    continue
                if _in_order(at, axis) and _in_order(after, axis):
                    step = _step(shape, at, axis, place, sizes)
                    pushed += 1
                    entry = (sent + step.bytes, len(steps) + 1, pushed, after, (*steps, step))
                    heappush(queue, entry)
    raise AssertionError(f"no route from {source} to {to}")


def apply(pieces: list[Tensor], step: Step, sizes: tuple[int, ...]) -> list[Tensor]:
    """Carry out a step: every device gets its new piece from those along the axis."""
    count, inner = sizes[step.axis], prod(sizes[step.axis + 1 :])
    out = list(pieces)
    for first in range(len(pieces)):
        if first // inner % count == 0:
            places = [first + index * inner for index in range(count)]
            new = _converted([pieces[place] for place in places], step.source, step.to)
            for place, piece in zip(places, new, strict=True):
                out[place] = piece
    return out


def _converted(pieces: list[Tensor], source: Placement, to: Placement) -> list[Tensor]:
    count = len(pieces)
    if to == PARTIAL and source == BROADCAST:
        return [pieces[0], *(torch.zeros_like(pieces[0]) for _ in pieces[1:])]
    if to == PARTIAL:  # each device keeps its part, between zeros
        zeros = torch.zeros_like(pieces[0])
        return [
            torch.cat([*[zeros] * index, piece, *[zeros] * (count - 1 - index)], source.dim)
            for index, piece in enumerate(pieces)
        ]
    whole = _combined(pieces, source)
    return [whole] * count if to == BROADCAST else _parts(whole, count, to.dim)


def _parts(value: Tensor, count: int, dim: int) -> list[Tensor]:
    """Return equal parts, each in memory of its own as a device has it: the CPU kernel of
    native_layer_norm_backward reads statistics as if they were contiguous."""
    return [part.contiguous() for part in value.chunk(count, dim)]


def _combined(pieces: list[Tensor], placement: Placement) -> Tensor:
    if placement.kind == "S":
        return torch.cat(pieces, placement.dim)
    return torch.stack(pieces).sum(0) if placement == PARTIAL else pieces[0]


def scatter(
    value: Tensor,
    placements: Placements,
    sizes: tuple[int, ...],
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Return the pieces of a value. Partial pieces are random if a generator is given, otherwise
    zero on all devices but the first."""
    if not placements:
        return [value]
    place, count = placements[0], sizes[0]
    if place.kind == "S":
        mine = _parts(value, count, place.dim)
    elif place == PARTIAL and generator is not None:
        mine = [
            torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for _ in range(count - 1)
        ]
        mine.append(value - sum(mine, start=torch.zeros_like(value)))
    else:
        same = [value] * count
        mine = same if place == BROADCAST else _converted(same, BROADCAST, place)
    return [piece for each in mine for piece in scatter(each, placements[1:], sizes[1:], generator)]


def assemble(pieces: list[Tensor], placements: Placements, sizes: tuple[int, ...]) -> Tensor:
    """Return the value that the pieces stand for.

    Raises:
        ValueError: devices that should have the same piece do not.
    """
    if not placements:
        return pieces[0]
    inner = len(pieces) // sizes[0]
    wholes = [
        assemble(pieces[start : start + inner], placements[1:], sizes[1:])
        for start in range(0, len(pieces), inner)
    ]
    if placements[0] == BROADCAST:
        for index, other in enumerate(wholes):
            if not torch.allclose(wholes[0], other, rtol=1e-9, atol=1e-9):
                raise ValueError(f"device {index} of an axis has another value than device 0")
    return _combined(wholes, placements[0])
