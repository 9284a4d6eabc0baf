"""The hops by which rows travel between ranks: one all-to-all, or one within nodes and one between.

With two hops (Tutel, Hwang et al., 2206.03382) a rank gives its rows first to the rank of its own
node that has the place of their goal in the goal's node, which then exchanges with those that have
this place in other nodes: as many bytes between nodes, in fewer and larger messages::

    rank (a, i)  --within node a-->  rank (a, j)  --between nodes-->  rank (b, j)

Rows arrive in the order of the ranks that they are from, whichever way they went.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import done, start_all_to_all
from megapipe.layers.row_codec import UNCODED, RowCodec


class Hop(NamedTuple):
    """An all-to-all of rows."""

    axis: Axis
    sends: Sequence[int]
    """Rows for each member."""
    receives: Sequence[int]


class Turn(NamedTuple):
    """Blocks of rows that are put into another order, from (i, j) to (j, i)."""

    blocks: Sequence[Sequence[int]]
    """Rows of each, [i][j]."""


Step = Hop | Turn
Moved = Callable[[int, int], int]
"""Rows that one member of the group has for another."""


class Trip:
    """Rows on their way, coded, the first hop of which has begun."""

    def __init__(self, rows: Tensor, steps: Iterable[Step], codec: RowCodec = UNCODED) -> None:
        self._codec, self._dtype = codec, rows.dtype
        self._rows = codec.coded(rows)
        self._steps = deque(steps)
        self._wait = done
        self._begin()

    def go_on(self) -> None:
        """Begin the next hop, if there is one."""
        if any(isinstance(step, Hop) for step in self._steps):
            self._begin()

    def arrived(self) -> Tensor:
        """The rows, at the end of their way."""
        while self._steps:
            self._begin()
        self._wait()
        self._wait = done
        self._rows = self._codec.decoded(self._rows, self._dtype)
        return self._rows

    def _begin(self) -> None:
        """Take the steps that are left up to a hop, which begins."""
        self._wait()
        self._wait = done
        while self._steps:
            step = self._steps.popleft()
            if isinstance(step, Turn):
                self._rows = _turned(self._rows, step.blocks)
                continue
            shape = self._rows.shape[1:]
            parts = step.sends, step.receives
            sends, receives = ([prod(shape) * n for n in part] for part in parts)
            flat, self._wait = start_all_to_all(self._rows.flatten(), step.axis, sends, receives)
            self._rows = flat.view(-1, *shape)
            return


def _turned(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    sizes = [size for line in blocks for size in line]
    parts, width = rows.split(sizes), len(blocks[0])
    return torch.cat([part for j in range(width) for part in parts[j::width]])


def steps_there(moved: Moved, ep: Axis, hops: tuple[Axis, Axis] | None) -> list[Step]:
    """From the tokens to the experts: in one hop, or within the node and between nodes."""
    if ep.size == 1:
        return []
    if hops is None:
        return [_flat(moved, ep)]
    own, passing, coming = _two_hops(moved, *hops)
    inner, outer = hops
    return [
        Turn(own),
        Hop(inner, _sums(_across(own)), _sums(passing)),
        Turn(passing),
        Hop(outer, _sums(_across(passing)), _sums(coming)),
    ]


def steps_back(moved: Moved, ep: Axis, hops: tuple[Axis, Axis] | None) -> list[Step]:
    """From the experts to the tokens, the same way."""
    if ep.size == 1:
        return []
    if hops is None:
        axis, sends, receives = _flat(moved, ep)
        return [Hop(axis, receives, sends)]
    own, passing, coming = _two_hops(moved, *hops)
    inner, outer = hops
    return [
        Hop(outer, _sums(coming), _sums(_across(passing))),
        Turn(_across(passing)),
        Hop(inner, _sums(passing), _sums(_across(own))),
        Turn(_across(own)),
    ]


def _flat(moved: Moved, ep: Axis) -> Hop:
    members = range(ep.size)
    sends = [moved(ep.index, member) for member in members]
    return Hop(ep, sends, [moved(source, ep.index) for source in members])


Blocks = list[list[int]]


def _two_hops(moved: Moved, inner: Axis, outer: Axis) -> tuple[Blocks, Blocks, Blocks]:
    """Rows that this rank has for (node, place); that it passes on, from a place of its node to
    other nodes; that are for it, from (node, place)."""
    places, nodes = range(inner.size), range(outer.size)

    def rank(node: int, place: int) -> int:
        return node * inner.size + place

    me = rank(outer.index, inner.index)
    own = [[moved(me, rank(node, place)) for place in places] for node in nodes]
    passing = [
        [moved(rank(outer.index, place), rank(node, inner.index)) for node in nodes]
        for place in places
    ]
    coming = [[moved(rank(node, place), me) for place in places] for node in nodes]
    return own, passing, coming


def _across(blocks: Blocks) -> Blocks:
    return [list(column) for column in zip(*blocks, strict=True)]


def _sums(blocks: Blocks) -> list[int]:
    return [sum(line) for line in blocks]
